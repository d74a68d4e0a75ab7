"""The slot `model`: a model describes itself once, and nobody asks what it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hpctrain.contracts.plugin import Plugin
from hpctrain.errors import UsageError

Batch = Any
"""What the collated samples of a micro batch are: a dict of tensors, or a list of tensors whose last is the target."""


class ModelSpec(Plugin):
    """What the trainer needs to know of a model. Parameter names are those of the module that `build` returns."""

    meta: ClassVar[bool] = True
    """Whether `build` can run on the meta device and `initialize` gives every value; if not, `build` runs under
    the seed on the CPU and its own values are taken."""

    counts: ClassVar[str] = "tokens"
    """What `count` counts, as the screen and metrics.jsonl call it."""

    @property
    def vocab_size(self) -> int | None:
        """Ids in the data must be smaller than this; None where the model reads no ids."""
        return None

    @property
    def max_seq_length(self) -> int | None:
        """The longest sequence, in tokens; None where there is no such limit."""
        return None

    @property
    def attention_heads(self) -> int | None:
        """Heads that tensor parallelism and Ulysses share out; None where nobody has counted them."""
        return None

    def tensor_plan(self) -> Mapping[str, str | Mapping[str, Any]]:
        """How tensor parallelism cuts the model: style by module pattern ("layers.*.mlp.up": "colwise").

        What `[parallelism.tensor] plan` takes, so a fused [q; k; v] is {"style": "colwise", "parts": 3}. Empty where
        the model does not say.
        """
        return {}

    def padding(self) -> dict[str, float]:
        """What makes samples of different lengths one batch: the value that fills each entry of a dict sample behind its end.

        The loss and `count` must not see filled places, and nothing before them may depend on them. Entries that are not
        named have one shape in all samples. Empty where the model takes samples of one length only.
        """
        return {}

    def sequence_dims(self) -> dict[str, int]:
        """The entries of a dict batch that context parallelism cuts, and along which dim; empty where it can't.

        Such a model takes `positions` (seq,) from the batch if it is there: where each token stands in its sequence.
        Labels are shifted before the cut.
        """
        return {}

    def attentions(self, module: nn.Module) -> list[nn.Module]:
        """Modules with a method `attend(query, key, value)`, causal attention that context parallelism may replace.

        All are `(batch, heads, seq, head_size)`, and so is what it returns.
        """
        return []

    @abstractmethod
    def build(self) -> nn.Module:
        """The module, on the current default device."""

    def build_on_meta(self) -> nn.Module:
        """A new module whose tensors have no memory; UsageError for sizes that torch can't count."""
        try:
            with torch.device("meta"):
                return self.build()
        except (RuntimeError, OverflowError) as error:
            raise UsageError(f"[model] {self.name}: it cannot be built in these sizes: {error}") from error

    def initialize(self, name: str, tensor: Tensor, rows: tuple[int, int], seed: int) -> None:
        """Fill `tensor`, rows `rows[0]` to `rows[1]` (dimension 0) of the parameter or buffer `name`.

        The values depend on (seed, name, row) alone, so that each rank makes just what it holds and every
        layout starts with the same numbers. Called only where `meta` is true.
        """
        raise RuntimeError(f"the model {self.name!r} says meta = True but does not initialize {name!r}")

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        """The repeated blocks, outermost first: what is checkpointed, compiled and wrapped one by one."""
        return []

    def ends(self, module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules that `embed` uses and those that `head` uses; empty where a pipeline can't cut the model."""
        return [], []

    def embed(self, module: nn.Module, batch: Batch) -> Tensor:
        """A batch -> what the first block takes. `forward` is embed, then each block, then head."""
        raise NotImplementedError(f"the model {self.name!r} has no embed")

    def head(self, module: nn.Module, hidden: Tensor) -> Any:
        """What the last block gives -> what goes to `loss`."""
        raise NotImplementedError(f"the model {self.name!r} has no head")

    @abstractmethod
    def forward(self, module: nn.Module, batch: Batch) -> Any:
        """Run `module` on a batch; what comes out goes to `loss`."""

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """What the loss of `batch` is a sum over: tokens that have a label, or samples (see `counts`)."""

    @abstractmethod
    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        """The SUM of the losses over what `count` counts, a scalar with a gradient.

        The trainer divides by the count of the whole step over all ranks, so that padding, token budgets and
        uneven ranks come out as in one process.
        """

    def flops(self, batch: Batch) -> int | None:
        """Floating point operations of forward and backward on `batch`; None where nobody has counted them."""
        return None
