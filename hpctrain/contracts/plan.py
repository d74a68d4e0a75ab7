"""The job as plugins see it before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from hpctrain.contracts.activation_checkpointing import ActivationCheckpointing
from hpctrain.contracts.model import ModelSpec
from hpctrain.contracts.parallelism import AxisTraits, Parallelism
from hpctrain.contracts.precision import Precision
from hpctrain.contracts.sharding import Sharding


@dataclass(frozen=True)
class Plan:
    """A job with its plugins and its layout. Plugins ask each other for traits, never for names."""

    tables: Mapping[str, Any]
    """The core's tables with all defaults: `tables["batch"]["micro_size"]`."""

    model: ModelSpec
    outline: nn.Module | None
    """The modules of the whole model, on the meta device unless they can't be built there; never to be changed. None where
    only `hpctrain check` would build them (a model that is no `MetaModel`)."""

    parallelism: Mapping[str, Parallelism]
    """The axes besides the data axes, by name; those of size 1 are left out."""

    sizes: Mapping[str, int]
    """The size of each of these axes."""

    sharding: Sharding
    precision: Precision
    activation_checkpointing: ActivationCheckpointing
    axes: Mapping[str, int] | None = None
    """The size of each mesh axis, the data axes included; None where the number of ranks is not known."""

    model_axes: Mapping[str, int] | None = None
    """Sizes of the model's axes as the sharding strategy sees them: axes that cut samples are part of a data axis."""

    data_axes: tuple[str, ...] = ()
    """The mesh axes that the sharding strategy cuts the data ranks into."""

    data_ranks: int | None = None
    """The number of ranks that see different samples; None where the number of ranks is not known."""

    micro_batches: int | None = None
    """The number of micro batches of a step on each rank; None where it is not known, or differs."""

    @property
    def traits(self) -> list[AxisTraits]:
        """The traits of all axes."""
        return [plugin.traits for plugin in self.parallelism.values()]

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled."""
        return bool(self.tables["compile"]["enabled"])

    @property
    def packs(self) -> bool:
        """Whether a row holds several samples, one after another."""
        return bool(self.tables["batch"]["packing"])
