"""The slot `model`: a model describes itself once, and nobody asks what it is.

`ModelSpec` is what every model has. What only some have is a subclass of it each, and a model derives from those that it is:
`class GPT(MetaModel, TokenModel, PipelineModel)`. Whoever needs such a part asks with isinstance.
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
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(one)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with what `function` makes of each tensor in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        mapped = {key: map_tensors(function, inner) for key, inner in value.items()}
        return mapped if type(value) is dict else type(value)(**mapped)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, inner) for inner in value))
    return type(value)(map_tensors(function, inner) for inner in value) if isinstance(value, (list, tuple)) else value


def trained_loss(found: Tensor | Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
    """The part of what `ModelSpec.loss` gave that is trained: of names with "loss" that one."""
    return found["loss"] if isinstance(found, Mapping) and "loss" in found else found


class ModelSpec(Plugin):
    """A model, as the trainer needs to know it. Parameter names are those of the module that `build` returns."""

    counts: ClassVar[str] = "tokens"
    """The unit of `count`, as the screen and metrics.jsonl call it."""

    @abstractmethod
    def build(self) -> nn.Module:
        """The module, on the current default device. It runs under the job's seed, and its own values are taken."""

    @abstractmethod
    def forward(self, module: nn.Module, batch: Batch) -> Any:
        """Run `module` on a batch; what comes out goes to `loss`."""

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """The number of terms in the loss of `batch`: tokens that have a label, or samples (see `counts`).

        The thread that loads samples asks, ahead of the step and while the module runs: the answer must depend on the batch alone,
        which is still as the data set made it.
        """

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor | Mapping[str, Tensor]:
        """The SUM of the losses over what `count` counts, a scalar with a gradient; or several such losses by name, which
        are added up for backward and also reported one by one; of names with "loss" that one is trained, the others reported only.

        The trainer divides by the count of the whole step over all ranks, so that padding, token budgets and
        uneven ranks come out as in one process.
        """

    def figures(self, outputs: Any, batch: Batch) -> Mapping[str, Tensor]:
        """Other SUMS over what `count` counts, scalars by name, whose means the rows of steps and evaluations report."""
        return {}

    def target(self, batch: Batch) -> Tensor:
        """The labels that metrics compare the outputs with."""
        target: Tensor = batch["labels"] if isinstance(batch, Mapping) else batch[-1]
        return target

    def logits(self, outputs: Any) -> Tensor:
        """The prediction among the `outputs` of `forward`, for metrics such as accuracy, for `predict` and `sample`: a tensor
        itself, else `outputs.logits`, as in transformers, else `outputs["logits"]`. Raises UsageError for other outputs."""
        found = outputs["logits"] if isinstance(outputs, Mapping) and "logits" in outputs else outputs
        found = found if isinstance(found, Tensor) else getattr(found, "logits", None)
        if isinstance(found, Tensor):
            return found
        raise UsageError(
            f"the model {self.name!r} returned {type(outputs).__name__}, in which the prediction is unknown; expected a tensor, "
            "`.logits`, or a dict with `logits`; a model plugin says which it is with the method logits"
        )

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """The repeated blocks, outermost first: what is checkpointed, compiled and wrapped one by one."""
        return []

    def flops(self, batch: Batch) -> int | None:
        """Floating point operations of forward and backward on `batch`; None where nobody has counted them."""
        return None


class MetaModel(ModelSpec):
    """A model that no rank ever holds as a whole: `build` runs on the meta device, and `initialize` gives the values.

    Buffers that are not saved have no `initialize`: `build` gives them values, on the CPU.
    """

    @abstractmethod
    def initialize(self, name: str, tensor: Tensor, rows: tuple[int, int], seed: int) -> None:
        """Fill `tensor`, rows `rows[0]` to `rows[1]` (dimension 0) of the parameter or persistent buffer `name`.

        The values depend on (seed, name, row) alone, so that each rank makes just what it holds and every
        layout starts with the same numbers.
        """

    def is_given(self, name: str) -> bool:
        """Whether the frozen parameter `name` stays out of checkpoints: `initialize` gives its values to a resume, too."""
        return False

    def source(self, seed: int) -> str:
        """A fingerprint of where the given values come from. A checkpoint keeps it, and a resume refuses another one."""
        return ""


class ExportableModel(ModelSpec):
    """A model that other libraries load from a directory."""

    @abstractmethod
    def export(self, values: Callable[[str], Tensor], out: Path, merged: bool) -> str:
        """Write the model into the empty directory `out`, as such a library reads it; return a few words about it.

        values: gives the full value of a parameter or buffer, on the CPU, read from the checkpoint when it is asked for. merged:
        add an adapter to what it adapts. Raises UsageError for `merged` without an adapter.
        """


class TokenModel(ModelSpec):
    """A model that reads sequences of token ids."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Ids in the data must be smaller than this."""

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

        The loss and `count` must not see filled places, and nothing before them may depend on them. Entries that are not
        named have one shape in all samples.
        """


class PackedModel(PaddedModel):
    """A model that takes several samples one behind the other in a row (`[batch] packing`).

    A packed batch has one row: the entries of `padding`, `(1, tokens, ...)`; `positions`, `(tokens,)`, the place of each token in
    its sample; and `documents`, a `Documents`. `forward` lets no token depend on another sample.
    """


class AttentionModel(ModelSpec):
    """A model whose attention heads may be shared out."""

    @property
    @abstractmethod
    def attention_heads(self) -> int:
        """Heads that tensor parallelism and Ulysses share out."""


class TensorParallelModel(ModelSpec):
    """A model that says how tensor parallelism cuts it."""

    @abstractmethod
    def tensor_plan(self) -> Mapping[str, str | Mapping[str, Any]]:
        """Style by module pattern ("layers.*.mlp.up": "colwise").

        What `[parallelism.tensor] plan` takes, so a fused [q; k; v] is {"style": "colwise", "parts": 3}.
        """


class ContextParallelModel(AttentionModel):
    """A model whose sequences context parallelism cuts."""

    @abstractmethod
    def sequence_dims(self) -> Mapping[str, int]:
        """The entries of a dict batch that are cut, and along which dim.

        `forward` takes `positions` (seq,) from the batch if it is there: where each token stands in its sequence.
        Labels are shifted before the cut. A PackedModel gets `documents`, too, and hands them to `attend`.
        """

    @abstractmethod
    def attentions(self, module: nn.Module) -> list[nn.Module]:
        """Modules with a method `attend(query, key, value)`, causal attention that context parallelism replaces.

        All are `(batch, heads, seq, head_size)`, and so is what it returns; keys and values may have fewer heads, each for as many
        queries that lie side by side. Those of a PackedModel call it with the `documents` of the batch, or None, as a fourth
        argument.
        """


class DistributedAttentionModel(ContextParallelModel):
    """A model whose attention computes over several ranks by itself, in place of a ring or Ulysses.

    Rank r has the r-th part of each sequence, and all parts are equally long. The modules of `attentions` need no `attend`; they
    have a method `distribute(group)`, which is called once, after tensor parallelism has cut the module.
    """


class PipelineModel(ModelSpec):
    """A model that a pipeline cuts between its `blocks`: `forward` is `embed`, then each block, then `head`."""

    @abstractmethod
    def ends(self, module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules that `embed` uses and those that `head` uses; both empty where this module can't be cut."""

    @abstractmethod
    def embed(self, module: nn.Module, batch: Batch) -> Tensor:
        """A batch -> what the first block takes."""

    @abstractmethod
    def head(self, module: nn.Module, hidden: Tensor) -> Any:
        """Turn the last block's output into the argument of `loss`."""
