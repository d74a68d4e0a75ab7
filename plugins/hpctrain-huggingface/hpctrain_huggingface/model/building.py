"""Builds a model of transformers on the meta device, with everything that its values need."""

from __future__ import annotations

import copy
import json
import logging
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from hpctrain.api import EnvironmentUnfitError, HpctrainError, UsageError, named_tensors, tied_parameters
from hpctrain_huggingface.model.attention import attend_causally
from hpctrain_huggingface.model.initial import Recipe, Recorder, told_on_meta
from hpctrain_huggingface.model.layers import Decoder, let_run_alone
from hpctrain_huggingface.model.options import HuggingFaceOptions
from hpctrain_huggingface.model.plan import PREFIX, base_name, tensor_plan, with_cut_vocabulary
from hpctrain_huggingface.model.tasks import TASKS
from hpctrain_huggingface.model.weights import Files, Weights, refuse_shape

if TYPE_CHECKING:
    from peft import PeftConfig

LOG = logging.getLogger("hpctrain")
_NUMBER = re.compile(r"(?<=\.)\d+\.")
"""The number of one of several equal layers, in a name."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def directory_of(path: Path) -> Path:
    """The directory at `path`, or of the repository of that name in this machine's cache. Raises UsageError for neither."""
    if path.is_dir():
        return path
    if path.exists() or path.is_absolute() or len(path.parts) > 2:
        raise UsageError(f"[model] path: there is no directory {path}; expected one that save_pretrained() made")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(path), local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        raise UsageError(
            f"[model] path: there is no directory {path}, and no repository of that name in this machine's cache; nothing is "
            f"downloaded in a job: run `hf download {path}` where there is a network"
        ) from None


def config_of(options: HuggingFaceOptions) -> PreTrainedConfig:
    """transformers' configuration. Raises UsageError for a model type or a key that it does not know."""
    keys = dict(options.config)
    if options.path is not None:
        directory = directory_of(options.path)
        if not (directory / "config.json").is_file():
            raise UsageError(f"[model] path: {directory} has no config.json, as save_pretrained() writes it")
        try:
            config = AutoConfig.from_pretrained(
                directory, local_files_only=True, trust_remote_code=options.trust_remote_code, **keys
            )
        except (ValueError, OSError, TypeError) as error:
            raise UsageError(f"[model] path: {directory}: {_first_line(error)}") from error
    else:
        try:
            config = AutoConfig.for_model(**keys)
        except (ValueError, TypeError) as error:
            raise UsageError(f"[model] config: {_first_line(error)}") from error
    known = type(config)(), GenerationConfig()  # which has decoder_start_token_id, say, that models read of their own
    for key in keys:
        if not any(hasattr(one, key) for one in known) and key not in _written(options):
            raise UsageError(f"[model] config: {key!r} is no key of transformers' {type(config).__name__}")
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(
            "[model] path: these weights are quantized, which can't be trained or cut; expected weights in bf16, fp16 or fp32"
        )
    return config  # type: ignore[no-any-return]


def _written(options: HuggingFaceOptions) -> dict[str, Any]:
    """The keys of the config.json at `path`, which may be another one's than transformers'."""
    if options.path is None:
        return {}
    written: dict[str, Any] = json.loads((directory_of(options.path) / "config.json").read_bytes())
    return written


@dataclass
class Built:
    """A model on the meta device, and where its values come from."""

    module: nn.Module
    base: PreTrainedModel
    config: PreTrainedConfig
    """The configuration as it was given: building changes the model's own."""
    recipes: dict[str, Recipe]
    """Initial values by the names of `module`."""
    wanted: dict[str, Tensor]
    """The state of the model of transformers by its own names, before an adapter was put in."""
    tied: list[list[str]]
    """The names of each tied parameter of the model of transformers, its main name first."""
    named: Path | None
    """The directory or the repository that the job names."""
    weights_at: Path | None
    adapter_at: Path | None
    architecture: type[PreTrainedModel]
    """The class of `base`, before sharding makes another one of it."""
    conversions: list[Any]
    """transformers' conversions of stored tensors for that class."""
    adapter_names: dict[str, list[str]]
    """The names in peft's files of each of the adapter's parameters."""
    frozen: set[str]
    """The parameters of `wanted` that are not trained."""

    @cached_property
    def weights(self) -> Weights | None:
        """The weights at `path`. Raises UsageError unless they are those of the model, or of another head on the same layers."""
        if self.weights_at is None:
            return None
        found = Weights(Files.of(self.weights_at), self.base, self.conversions, self.wanted, self.tied)
        shapes = found.files.shapes()
        for name, source in found.sources.items():
            if source.converter is None:
                ((stored, _),) = source.stored
                refuse_shape(f"{stored} in {self.weights_at}", shapes[stored], self.wanted[name].shape)
        missing, unused = self._unmatched(found)
        kind = self.architecture.__name__
        written = json.loads((self.weights_at / "config.json").read_bytes()).get("architectures") or [kind]
        other_head = kind not in written
        lists = {name[: at.start()] for name in self.wanted for at in _NUMBER.finditer(name)}
        lost = [name for name in missing if not other_head or name in self.frozen or _NUMBER.search(name)]
        strange = [
            name
            for name, own in unused.items()
            if not other_head or any(own[: at.start()] in lists for at in _NUMBER.finditer(own))
        ]
        if strange and not lost:
            heads = self._state_of_other_classes()
            strange = [name for name in strange if unused[name] not in heads]
        if lost or strange:
            parts = [
                f"{verb} {', '.join(names[:3])}{', ...' * (len(names) > 3)}"
                for verb, names in (("lacks", lost), ("has besides", strange))
                if names
            ]
            raise UsageError(
                f"[model] path: {self.weights_at} {' and '.join(parts)}"
                + (
                    ", which would begin with random values and stay frozen; name them in modules_to_save of [model] adapter"
                    if other_head and lost and lost[0] in self.frozen
                    else f": its weights are of another model than the {kind} of the configuration"
                )
            )
        return found

    def _state_of_other_classes(self) -> set[str]:
        """The names in the states of all classes of the architecture: one that was trained before may have had more heads."""
        found: set[str] = {name for name, _ in self.base.named_buffers()}
        for one in vars(sys.modules[self.architecture.__module__]).values():
            if isinstance(one, type) and issubclass(one, PreTrainedModel) and one.config_class is type(self.config):
                with suppress(Exception), torch.device("meta"):  # not every class takes every configuration
                    found |= one(copy.deepcopy(self.config)).state_dict().keys()
        return found

    def _unmatched(self, found: Weights) -> tuple[list[str], dict[str, str]]:
        """The names of the model that the files lack, and the stored ones that it doesn't take, with those that it would give
        them; without those that transformers passes over, too."""
        base: Any = self.base
        ignored = {"missing": base._keys_to_ignore_on_load_missing, "unused": base._keys_to_ignore_on_load_unexpected}

        def counts(kind: str, name: str) -> bool:
            return not any(re.search(pattern, name) for pattern in ignored[kind] or ())

        names = (name for name in self.wanted if name not in found.sources and name not in self.main_names)
        return (
            [name for name in names if counts("missing", name)],
            {
                name: own
                for name, own in found.unused.items()
                if counts("unused", name) and "rotary_emb.inv_freq" not in name
            },
        )

    @cached_property
    def _told_weights(self) -> Weights | None:
        """The weights, with warnings for a head that they lack."""
        found = self.weights
        if found is not None:
            missing, unused = self._unmatched(found)
            if missing:
                LOG.warning(
                    "weights      %s lacks %s, which begin with random values", self.weights_at, ", ".join(missing)
                )
            if unused:
                LOG.warning("weights      %s: the model has no use for %s", self.weights_at, ", ".join([*unused][:5]))
        return found

    @cached_property
    def main_names(self) -> dict[str, str]:
        """The main name of each tied parameter of the model of transformers that has another one, too."""
        return _main_names(self.tied)

    @cached_property
    def identity(self) -> str:
        """A hash of the weights' files and of the configuration beside them; "" without."""
        if self.weights is None or self.weights_at is None:
            return ""
        written = (self.weights_at / "config.json").read_bytes()
        return f"{self.weights.files.identity()} {sha256(written).hexdigest()}"

    @cached_property
    def adapter_files(self) -> Files | None:
        """The weights of a saved adapter. Raises UsageError unless they are those of the configuration beside them."""
        if self.adapter_at is None:
            return None
        found = Files.of(self.adapter_at, "adapter_model.safetensors")
        several = [name for names in self.adapter_names.values() for name in names]
        lost = [names[0] for names in self.adapter_names.values() if not found.places.keys() & {*names}]
        strange = [name for name in found.places if name not in several]
        if lost or strange:
            one = f"lacks {lost[0]}" if lost else f"has besides {strange[0]}"
            raise UsageError(
                f"[model] adapter: {self.adapter_at} {one}: its weights are of another adapter than its configuration"
            )
        return found

    def refuse_unknown(self) -> None:
        """Raises UsageError for a parameter or buffer that would have no values, or those of another model."""
        files, weights = self.adapter_files, self.weights
        for name, recipe in self.recipes.items():
            own = base_name(name)
            is_stored = files is not None and name in self.adapter_names
            is_given = weights is not None and self.main_names.get(own, own) in weights.sources
            if not is_stored and not is_given:
                recipe.refuse_unknown(name)

    def fill(self, name: str, tensor: Tensor, rows: tuple[int, int], seed: int) -> None:
        """Fill `tensor`, the rows `rows` of the parameter or buffer `name`."""
        own, recipe = base_name(name), self.recipes[name]
        own = self.main_names.get(own, own)
        files, weights = self.adapter_files, self._told_weights
        stored = [] if files is None else [one for one in self.adapter_names.get(name, ()) if one in files.places]
        if files is not None and stored:
            files.fill(stored[0], tensor, rows, recipe.shape)
        elif weights is not None and own in weights.sources:
            weights.fill(own, tensor, rows, recipe.shape)
        else:
            recipe.fill(name, tensor, rows, seed)


def build(config: PreTrainedConfig, options: HuggingFaceOptions, task: str, adapter: PeftConfig | None) -> Built:
    """Raises UsageError for a task or an attention that the model does not have, EnvironmentUnfitError for a missing package."""
    frozen = _DTYPES.get(options.frozen_dtype, torch.get_default_dtype())
    given, config = config, copy.deepcopy(config)
    for one in (config, config.get_text_config()):
        if getattr(one, "use_cache", None):
            one.use_cache = False  # keys and values for generation; a recomputed forward would add them twice
    base = _base(config, options, task, frozen)
    sees_all = getattr(config, "causal", True) is False or getattr(config, "attn_type", "") == "bi"  # XLM and XLNet
    if task == "causal-lm" and (sees_all or any(getattr(one, "is_decoder", True) is False for one in base.modules())):
        raise UsageError(
            f"[model] task: a {type(base).__name__} shows each token those that come after it, and would learn to copy; set "
            "[model] config = { is_decoder = true }, or choose the task masked-lm"
        )
    tied, wanted = tied_parameters(base), dict(base.state_dict())
    architecture, conversions = type(base), get_model_conversion_mapping(base)
    base_parameters = [name for name, _ in base.named_parameters()]
    recorder = Recorder()
    with torch.device("cpu"):
        for name, buffer in base.named_non_persistent_buffers():
            _set_buffer(base, name, torch.empty_like(buffer, device="cpu"))
        with recorder, told_on_meta(), _untied(base, tied):
            base.initialize_weights()
    changes = {name: recorder.of(tensor) for name, tensor in named_tensors(base)}
    module: nn.Module = base
    if adapter is not None:
        from hpctrain_huggingface.model.adapters import with_adapter

        with recorder, told_on_meta():
            module = with_adapter(base, adapter, task)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.get_default_dtype())
    main = _main_names(tied)
    recipes = {}
    for name, tensor in named_tensors(module):
        own = base_name(name)
        recipes[name] = Recipe(tuple(tensor.shape), changes.get(main.get(own, own)) or recorder.of(tensor))
    _bring_plan(module, base, task, bool(tied))
    routes = getattr(config, "output_router_logits", False)  # with a mask of its own
    if task == "causal-lm" and options.attention is None and not routes:
        attend_causally(base)
    decoder = Decoder.of(base) if task == "causal-lm" else None
    if decoder is not None:
        let_run_alone(decoder)
    if options.loss_chunk:
        if task != "causal-lm" or routes:
            what = "a router's loss is computed from all outputs" if routes else f"the task is {task!r}"
            raise UsageError(f"[model] loss_chunk: {what}; it goes with the loss of a causal-lm alone")
        from hpctrain_huggingface.model.chunks import lose_in_chunks

        lose_in_chunks(base, options.loss_chunk)
    at = None if options.path is None else directory_of(options.path)
    saved = options.adapter.get("path")
    names = {}
    if adapter is not None:
        from hpctrain_huggingface.model.adapters import stored_names

        names = stored_names(module)
    trained = {base_name(name) for name, one in module.named_parameters(remove_duplicate=False) if one.requires_grad}
    return Built(
        module, base, given, recipes, wanted, tied, options.path, at, None if saved is None else Path(saved),
        architecture, conversions, names, set(base_parameters) - trained,
    )  # fmt: skip


def _base(config: PreTrainedConfig, options: HuggingFaceOptions, task: str, dtype: torch.dtype) -> PreTrainedModel:
    auto = getattr(transformers, TASKS[task].auto)
    # torch's grouped products take no float64
    experts = options.experts or ("eager" if torch.get_default_dtype() == torch.float64 else None)
    chosen = {"attn_implementation": options.attention, "experts_implementation": experts}
    given = {key: value for key, value in chosen.items() if value is not None}
    try:
        made: Any = auto.from_config(config, dtype=dtype, trust_remote_code=options.trust_remote_code, **given)
    except ImportError as error:
        raise EnvironmentUnfitError(f"[model] huggingface: {_first_line(error)}") from error
    except HpctrainError:
        raise
    except (ValueError, TypeError) as error:
        raise UsageError(f"[model] huggingface: {_first_line(error)}") from error
    return made  # type: ignore[no-any-return]


def _bring_plan(module: nn.Module, base: PreTrainedModel, task: str, tied: bool) -> None:
    """Give the module the plan that tensor parallelism asks it for."""
    own = getattr(base, "_tp_plan", None)
    if not own:
        return
    prefix = "" if module is base else PREFIX
    plan = tensor_plan(module, own, prefix)
    head: Any = base.get_output_embeddings() if TASKS[task].of_tokens else None
    if isinstance(head, nn.Linear):
        names = {id(one): name for name, one in module.named_modules()}
        embedding = names[id(base.get_input_embeddings())]
        plan = with_cut_vocabulary(plan, module, names[id(head)], embedding, tied)
    module._tp_plan = plan  # type: ignore[assignment]


@contextmanager
def _untied(module: nn.Module, tied: Iterable[Sequence[str]]) -> Iterator[None]:
    """The module with parameters of their own in the places that are tied: an initialization of one must not change the other."""
    places = [(*name.rpartition(".")[::2], first) for first, *others in tied for name in others]
    for owner, last, first in places:
        kept = module.get_parameter(first)
        setattr(module.get_submodule(owner), last, nn.Parameter(torch.empty_like(kept), kept.requires_grad))
    try:
        yield
    finally:
        for owner, last, first in places:
            setattr(module.get_submodule(owner), last, module.get_parameter(first))


def _main_names(tied: Iterable[Sequence[str]]) -> dict[str, str]:
    """The main name by each other name of a tied parameter."""
    return {other: first for first, *others in tied for other in others}


def _set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    owner, _, last = name.rpartition(".")
    module.get_submodule(owner).register_buffer(last, value, persistent=False)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
