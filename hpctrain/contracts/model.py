"""The slot `model`: a model describes itself once, and nobody asks for its name.

`ModelSpec` is the part of every model. Each optional part is a subclass of it, and a model derives from the parts that it has:
`class GPT(MetaModel, TokenModel, PipelineModel)`. Code that needs a part asks with isinstance.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from hpctrain.base.errors import UsageError
from hpctrain.contracts.plugin import Plugin

Batch = Any
"""The collated samples of a micro batch: a dict of tensors, or a list of tensors whose last is the target."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch or of a model's outputs, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(inner)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with `function` applied to each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(function, inner) for key, inner in value.items()}
        return mapped if type(value) is dict else type(value)(**mapped)  # outputs of transformers, say
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple takes values, not an iterable
        return type(value)(*(map_tensors(function, inner) for inner in value))
    return type(value)(map_tensors(function, inner) for inner in value) if isinstance(value, (list, tuple)) else value


def trained_loss(losses: Tensor | Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
    """The trained part of a result of `ModelSpec.loss`: the loss "loss", if there is one of this name, else all."""
    return losses["loss"] if isinstance(losses, Mapping) and "loss" in losses else losses


class ModelSpec(Plugin):
    """A model's description for the trainer. Parameter names are those of the module that `build` returns."""

    counts: ClassVar[str] = "tokens"
    """The unit of `count`, as the screen and metrics.jsonl call it."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The module, on the current default device. Called under the job's seed; the module's values are used."""

    @abstractmethod
    def forward(self, module: nn.Module, batch: Batch) -> Any:
        """Run `module` on a batch; `loss` gets the result."""

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """The number of terms in the loss of `batch`: tokens that have a label, or samples (see `counts`).

        The thread that loads samples asks, ahead of the step and while the module runs: the answer must depend on the batch alone,
        which is not on the device yet.
        """

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor | Mapping[str, Tensor]:
        """The SUM of the losses over what `count` counts, a scalar with a gradient; or several such losses by name, which
        are added up for backward and also reported one by one. If one of them is called "loss", only that one is trained.

        The trainer divides by the count of the whole step over all ranks, so padding, token budgets and uneven ranks
        give the gradient of one process (docs/decisions/0004).
        """

    def figures(self, outputs: Any, batch: Batch) -> Mapping[str, Tensor]:
        """Other SUMS over what `count` counts, scalars by name; the rows of steps and evaluations report their means."""
        return {}

    def target(self, batch: Batch) -> Tensor:
        """The labels that metrics compare the outputs with."""
        target: Tensor = batch["labels"] if isinstance(batch, Mapping) else batch[-1]
        return target

    def logits(self, outputs: Any) -> Tensor:
        """The prediction among the `outputs` of `forward`, for metrics such as accuracy, for `predict` and `sample`: `outputs`
        itself if it is a tensor, else `outputs["logits"]`, else `outputs.logits`. Raises UsageError for other outputs."""
        logits = outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs
        logits = logits if isinstance(logits, Tensor) else getattr(logits, "logits", None)
        if isinstance(logits, Tensor):
            return logits
        raise UsageError(
            f"the model {self.name!r} returned {type(outputs).__name__}, in which the prediction is unknown; expected a tensor, "
            "`.logits`, or a dict with `logits`; a model plugin says which it is with the method logits"
        )

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """The repeated blocks, outermost first: the units that are checkpointed, compiled and wrapped."""
        return []

    def flops(self, batch: Batch) -> int | None:
        """The floating point operations of forward and backward on `batch`; None where nobody has counted them."""
        return None


class MetaModel(ModelSpec):
    """A model that no rank has to hold whole: `build` runs on the meta device, and `initialize` gives the values.

    Buffers that are not saved have no `initialize`: `build` gives them values, on the CPU.
    """

    @abstractmethod
    def initialize(self, name: str, tensor: Tensor, rows: tuple[int, int], seed: int) -> None:
        """Fill `tensor`, rows `rows[0]` to `rows[1]` (dimension 0) of the parameter or persistent buffer `name`.

        The values depend on (seed, name, row) alone, so each rank makes only its own rows, and every layout starts with
        the same numbers.
        """

    def is_given(self, name: str) -> bool:
        """Whether the frozen parameter `name` stays out of checkpoints: `initialize` gives its values to a resume, too."""
        return False

    def source(self, seed: int) -> str:
        """A fingerprint of the source of given values. A checkpoint keeps it, and a resume refuses another one."""
        return ""


class ExportableModel(ModelSpec):
    """A model that other libraries load from a directory."""

    @abstractmethod
    def export(self, values: Callable[[str], Tensor], out: Path, merged: bool) -> str:
        """Write the model into the empty directory `out` in the form of such a library; return a few words about it.

        values: gives the full value of a parameter or buffer, on the CPU, read from the checkpoint on each call. merged: add an
        adapter to the weights that it adapts. Raises UsageError for `merged` without an adapter.
        """


class TokenModel(ModelSpec):
    """A model that reads sequences of token ids."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of ids: those in the data must be smaller."""

    @property
    @abstractmethod
    def max_seq_length(self) -> int:
        """The longest sequence, in tokens."""


class PaddedModel(ModelSpec):
    """A model that takes samples of different lengths in one batch."""

    optional_entries: ClassVar[frozenset[str]] = frozenset()
    """Entries of `padding` that samples need not have."""

    @abstractmethod
    def padding(self) -> Mapping[str, float]:
        """The value that fills each entry of a dict sample behind its end.

        The loss and `count` must not see filled places, and nothing before them may depend on them. Other entries have
        one shape in all samples.
        """


class PackedModel(PaddedModel):
    """A model that takes several samples in a row, one after another (`[batch] packing`).

    A packed batch has one row: the entries of `padding`, `(1, tokens, ...)`; `positions`, `(tokens,)`, the place of each token in
    its sample; and `documents`, a `Documents`. `forward` must let no token depend on another sample.
    """


class AttentionModel(ModelSpec):
    """A model whose attention heads may be distributed over ranks."""

    @property
    @abstractmethod
    def attention_heads(self) -> int:
        """The number of heads that tensor parallelism and Ulysses distribute."""


class TensorParallelModel(ModelSpec):
    """A model with a plan of how tensor parallelism cuts it."""

    @abstractmethod
    def tensor_plan(self) -> Mapping[str, str | Mapping[str, Any]]:
        """The style by module pattern ("layers.*.mlp.up": "colwise").

        It has the form of `[parallelism.tensor] plan`, so a fused [q; k; v] is {"style": "colwise", "parts": 3}.
        """


class ContextParallelModel(AttentionModel):
    """A model whose sequences context parallelism cuts."""

    @abstractmethod
    def sequence_dims(self) -> Mapping[str, int]:
        """The entries of a dict batch that are cut, each with the dim of the cut.

        `forward` takes `positions` (seq,), the place of each token in its sequence, from the batch if it is there.
        Labels are shifted before the cut. A PackedModel also gets `documents`, and passes them to `attend`.
        """

    @abstractmethod
    def attentions(self, module: nn.Module) -> list[nn.Module]:
        """Modules with a method `attend(query, key, value)`, causal attention that context parallelism replaces.

        Its arguments and its result are `(batch, heads, seq, head_size)`; keys and values may have fewer heads, each shared by
        the same number of adjacent query heads. Modules of a PackedModel call it with the `documents` of the batch, or None, as a
        fourth argument.
        """


class DistributedAttentionModel(ContextParallelModel):
    """A model whose attention itself computes over several ranks, in place of a ring or Ulysses.

    Rank r has the r-th part of each sequence, and all parts are equally long. The modules of `attentions` need no `attend`; they
    have a method `distribute(group)`, which is called once, after tensor parallelism has cut the module.
    """


class PipelineModel(ModelSpec):
    """A model that a pipeline cuts between its `blocks`: `forward` is `embed`, then each block, then `head`."""

    @abstractmethod
    def ends(self, module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules that `embed` uses, and those that `head` uses; both empty where this module can't be cut."""

    @abstractmethod
    def embed(self, module: nn.Module, batch: Batch) -> Tensor:
        """Turn a batch into the input of the first block."""

    @abstractmethod
    def head(self, module: nn.Module, hidden: Tensor) -> Any:
        """Turn the last block's output into the argument of `loss`."""
