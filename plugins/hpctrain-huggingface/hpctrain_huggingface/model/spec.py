"""Models of transformers that train for one of the tasks in tasks.py.

transformers is imported in methods: every command loads this module, and transformers takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hpctrain.api import (
    Batch,
    ContextParallelModel,
    ExportableModel,
    MetaModel,
    PackedModel,
    PaddedModel,
    PipelineModel,
    Plan,
    Problem,
    TokenModel,
    UsageError,
)
from hpctrain.toolkit.losses import NOT_CHUNKED, can_chunk
from hpctrain_huggingface.model import tasks
from hpctrain_huggingface.model.options import HuggingFaceOptions
from hpctrain_huggingface.model.plan import base_name

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedConfig, PreTrainedModel

    from hpctrain_huggingface.model.building import Built
    from hpctrain_huggingface.model.layers import Decoder


_FROM_PADDING = (
    "roberta",
    "xlm_roberta",
    "xlm_roberta_xl",
    "roberta_prelayernorm",
    "camembert",
    "longformer",
    "data2vec_text",
)
"""Kinds of models whose positions begin behind `pad_token_id`."""


class HubModel(MetaModel, PaddedModel, ExportableModel):
    """A model of transformers, with an adapter of peft or without."""

    name = "huggingface"
    Options = HuggingFaceOptions
    options: HuggingFaceOptions
    optional_entries = frozenset(
        ("input_ids", "attention_mask", "token_type_ids", "decoder_input_ids", "decoder_attention_mask")
    )

    def __init__(self, options: HuggingFaceOptions) -> None:
        """Raises UsageError for a configuration, a task or an adapter that transformers or peft does not have."""
        super().__init__(options)
        from hpctrain_huggingface.model.building import config_of

        self.config: PreTrainedConfig = config_of(options)
        self.task = tasks.task_of(options.task, self.config, options.path)
        of_tokens = tasks.TASKS[self.task].of_tokens and options.preference is None
        self.counts = "tokens" if of_tokens else "samples"  # type: ignore[misc]
        self.adapter: PeftConfig | None = None
        if options.adapter:
            from hpctrain_huggingface.model.adapters import adapter_config

            self.adapter = adapter_config(options.adapter, self.task)
        self._built: list[Built] = []
        """The latest module, whose values `initialize` makes."""

    def problems(self, plan: Plan) -> list[Problem]:
        self._latest().refuse_unknown()
        data = plan.tables["dataset"]
        made = [key for key in ("messages", "completion", "text") if data.get(key) is not None]
        if data.get("name") == self.name and made and data.get("label") is None and self.task != "causal-lm":
            why = f"the labels of {made[0]} are the next tokens, and the task is {self.task!r}; use columns, or text with label"
            return [Problem(why, f"dataset.{made[0]}")]
        peft_type: Any = None if self.adapter is None else self.adapter.peft_type
        kind = None if peft_type is None else str(peft_type.value)
        if kind not in (None, "LORA") and plan.sizes.get("tensor", 1) > 1:
            why = f"tensor parallelism cuts adapters of the kind lora only, found {kind}"
            return [Problem(why, "parallelism.tensor")]
        return []

    def build(self) -> nn.Module:
        from hpctrain_huggingface.model.building import build

        self._built[:] = [build(self.config, self.options, self.task, self.adapter)]
        return self._built[0].module

    def initialize(self, name: str, tensor: Tensor, rows: tuple[int, int], seed: int) -> None:
        """The stored values; where there are none, those of transformers' own initialization, drawn by rows."""
        self._latest().fill(name, tensor, rows, seed)

    def is_given(self, name: str) -> bool:
        return self.adapter is not None and base_name(name) in self._latest().wanted

    def source(self, seed: int) -> str:
        if self.adapter is None:
            return ""
        keys = json.dumps([self.options.config, self.task], sort_keys=True, default=str)
        given = self._latest().identity or f"seed {seed}"
        return sha256(f"{keys} {given}".encode()).hexdigest()[:16]

    def export(self, values: Callable[[str], Tensor], out: Path, merged: bool) -> str:
        """Write what from_pretrained() takes, with the tokenizer's files of `path`; of an adapter, what peft loads."""
        from hpctrain_huggingface.model.exporting import export

        return export(self._latest(), values, out, merged)

    def _latest(self) -> Built:
        if not self._built:
            with torch.device("meta"):
                self.build()
        return self._built[0]

    @property
    def _routes(self) -> bool:
        return bool(getattr(self.config, "output_router_logits", False))

    @property
    def _pad(self) -> int | None:
        pad = getattr(self.config.get_text_config(), "pad_token_id", None)
        return pad if isinstance(pad, int) and pad >= 0 else None

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """transformers' own layers, which it recomputes one by one, too."""
        from transformers.modeling_layers import GradientCheckpointingLayer

        return [one for one in module.modules() if isinstance(one, GradientCheckpointingLayer)]

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        """The logits, (batch, seq, vocabulary) or (batch, classes); with the loss of a router if the configuration asks for it.

        With `loss_chunk`, the sum of the loss where a backward may follow."""
        given = self.inputs(module, batch)
        if self.options.loss_chunk and torch.is_grad_enabled():
            return module(**given, loss_labels=batch["labels"])
        if self.task == "seq2seq-lm" and "decoder_input_ids" not in given:
            given["decoder_input_ids"] = self._shifted(module, batch["labels"])
        outputs = module(**given)
        router = getattr(outputs, "aux_loss", None)
        return outputs.logits if router is None else {"logits": outputs.logits, "router": router}

    def inputs(self, module: nn.Module, batch: Batch) -> dict[str, Any]:
        """The arguments of the module's forward."""
        return tasks.inputs(self.task, self._pad, batch, self._routes)

    def _shifted(self, module: nn.Module, labels: Tensor) -> Tensor:
        """The decoder's inputs: the labels one place later."""
        base: Any = _base(module)
        prepare = getattr(base, "prepare_decoder_input_ids_from_labels", None)
        if prepare is None:
            raise UsageError(
                f"[model] huggingface: a {type(base).__name__} makes no decoder_input_ids from labels; let the data set give them"
            )
        return prepare(labels=labels)  # type: ignore[no-any-return]

    def count(self, batch: Batch) -> int:
        task = tasks.TASKS[self.task]
        if task.of_tokens:
            tasks.refuse_copies(self.task, batch)  # here, where the batch is in the host's memory
        elif (
            batch["labels"].dim() > 1
            and tasks.problem_of(self.config, batch["labels"]) == "single_label_classification"
        ):
            found = f"labels of the shape {tuple(batch['labels'].shape)}"
            raise UsageError(f"[dataset]: found {found}, and the task {self.task!r} has one for each sample")
        return tasks.count(task, batch)

    def loss(self, outputs: Any, batch: Batch) -> Tensor | Mapping[str, Tensor]:
        """The sum over labels; a router's own loss, a mean over tokens, with its coefficient, for each of them."""
        task, problem = tasks.TASKS[self.task], tasks.problem_of(self.config, batch["labels"])
        if isinstance(outputs, Tensor):
            return outputs if not outputs.dim() else tasks.loss(task, problem, outputs, batch)
        own = tasks.loss(task, problem, outputs["logits"], batch)
        share = float(getattr(self.config, "router_aux_loss_coef", 0.0)) * (batch["labels"] != tasks.IGNORED).sum()
        return {"loss": own, "router": outputs["router"].to(own) * share}

    def padding(self) -> Mapping[str, float]:
        ids = self._pad or 0
        of_tokens = {"labels": tasks.IGNORED} if tasks.TASKS[self.task].of_tokens else {}
        named = ("attention_mask", "token_type_ids", "decoder_attention_mask")
        return {"input_ids": ids, "decoder_input_ids": ids, **dict.fromkeys(named, 0), **of_tokens}


class TextModel(HubModel, TokenModel):
    """A model of transformers that reads token ids."""

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def max_seq_length(self) -> int:
        text = self.config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None)
        if not isinstance(longest, int) or longest < 1:
            return 2**31
        pad = self._pad
        begins_behind_padding = str(text.model_type).replace("-", "_") in _FROM_PADDING
        return longest - pad - 1 if begins_behind_padding and pad is not None else longest


class CausalLanguageModel(TextModel, PackedModel, PipelineModel):
    """A model of transformers that continues texts."""

    def problems(self, plan: Plan) -> list[Problem]:
        from hpctrain_huggingface.model.layers import Decoder

        found = super().problems(plan)
        if self.options.loss_chunk and not can_chunk(plan):
            found.append(Problem(NOT_CHUNKED, "model.loss_chunk"))
        if plan.sizes.get("pipeline", 1) > 1:
            decoder = Decoder.of(self._latest().module)
            if decoder is not None:
                decoder.refuse_uncut()
            if plan.sizes.get("context", 1) > 1:
                why = "later pipeline stages of this model don't know which tokens they have; use one of the two axes"
                found.append(Problem(why, "parallelism.context"))
            if self._routes:
                why = "the loss of the router needs all layers; set [model] config = { output_router_logits = false }"
                found.append(Problem(why, "parallelism.pipeline"))
        if self._routes and plan.packs:
            why = "the loss of the router would need a mask of the padding, with which transformers does not keep samples apart"
            found.append(Problem(f"{why}; set [model] config = {{ output_router_logits = false }}", "batch.packing"))
        return found

    def inputs(self, module: nn.Module, batch: Batch) -> dict[str, Any]:
        given = super().inputs(module, batch)
        from hpctrain_huggingface.model.attention import causal_mask, is_given

        if is_given(_base(module)):
            if "documents" in batch:
                given["documents"] = batch["documents"]
            else:
                given["attention_mask"] = causal_mask(batch.get("attention_mask"), batch.get("position_ids"))
        return given

    def ends(self, module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        from hpctrain_huggingface.model.layers import Decoder

        decoder = Decoder.of(module)
        return ([], []) if decoder is None else decoder.ends()

    def embed(self, module: nn.Module, batch: Batch) -> Tensor:
        """The first layer's input. Raises UsageError for entries that later layers would not see."""
        unseen = [name for name in ("attention_mask", "position_ids", "token_type_ids") if name in batch]
        if unseen:
            raise UsageError(
                f"[parallelism] pipeline: found {unseen[0]} in the samples, which layers on other ranks do not get; leave it out: "
                "padding at the end of a row needs none"
            )
        return self._decoder(module).embedded(**tasks.inputs(self.task, self._pad, batch))

    def head(self, module: nn.Module, hidden: Tensor) -> Any:
        return self._decoder(module).outputs(hidden).logits

    def _decoder(self, module: nn.Module) -> Decoder:
        from hpctrain_huggingface.model.layers import Decoder

        found = Decoder.of(module)
        assert found is not None  # see ends
        return found


class AttentiveModel(CausalLanguageModel, ContextParallelModel):
    """A model of transformers that continues texts by attention."""

    @property
    def attention_heads(self) -> int:
        return int(self.config.get_text_config().num_attention_heads)

    def problems(self, plan: Plan) -> list[Problem]:
        from hpctrain_huggingface.model.attention import not_exchanged

        found = super().problems(plan)
        why = not_exchanged(self._latest().base) if plan.sizes.get("context", 1) > 1 else None
        return found if why is None else [*found, Problem(f"{why}; use another axis", "parallelism.context")]

    def sequence_dims(self) -> Mapping[str, int]:
        return {"input_ids": 1, "labels": 1}

    def attentions(self, module: nn.Module) -> list[nn.Module]:
        from hpctrain_huggingface.model.attention import give_to_attention

        return give_to_attention(_base(module))


def _base(module: nn.Module) -> PreTrainedModel:
    """The model of transformers in `module`."""
    from transformers import PreTrainedModel

    return next(one for one in module.modules() if isinstance(one, PreTrainedModel))
