"""How the world's ranks are laid out: the mesh axes and the DeviceMesh made of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpctrain.errors import UsageError
from hpctrain.torch_private import flatten_mesh

if TYPE_CHECKING:
    from hpctrain.contracts.parallelism import Parallelism
    from hpctrain.job.parts import Parts
    from hpctrain.job.tables import Job

_DATA_ORDER = 20
"""The place of the outermost data axis; the others follow it."""


@dataclass(frozen=True)
class Layout:
    """How the ranks are shared out.

    axes: the size of each axis, outermost first; the data axes are always there. model_axes: those over which the
    model is spread. Axes that cut samples (context parallelism) are missing there: to the sharding strategy their ranks are
    data-parallel, so they are part of a data axis. data_axes: those that the strategy cuts the data ranks into.
    """

    axes: dict[str, int]
    model_axes: dict[str, int]
    data_axes: tuple[str, ...]

    @property
    def data_ranks(self) -> int:
        """Ranks that see different samples."""
        return prod(self.axes[axis] for axis in self.data_axes)

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.axes.items() if size > 1) or "one rank"


def layout_of(job: Job, parts: Parts, world_size: int) -> Layout:
    """Raises UsageError when the axes' sizes do not multiply to the world size."""
    sizes = {name: axis.size for name, axis in job.parallelism.items()}
    replicate = sizes.pop("replicate", 1)
    others = prod(sizes.values())
    if world_size % (others * replicate):
        asked = " x ".join(f"{name} {axis.size}" for name, axis in job.parallelism.items())
        raise UsageError(
            f"[parallelism]: {asked} needs a multiple of {others * replicate} ranks, and there are {world_size}; "
            "start another number of ranks or change the sizes"
        )
    cutting = {name for name, plugin in parts.parallelism.items() if plugin.traits.cuts_samples}
    cut = prod(sizes[name] for name in cutting)
    data_ranks = world_size // others
    data, spread_data = (parts.sharding.axes(ranks, replicate) for ranks in (data_ranks, data_ranks * cut))
    spreading = {name: plugin for name, plugin in parts.parallelism.items() if name not in cutting}
    return Layout(_in_order(data, parts.parallelism, sizes), _in_order(spread_data, spreading, sizes), tuple(data))


def _in_order(data: dict[str, int], plugins: dict[str, Parallelism], sizes: dict[str, int]) -> dict[str, int]:
    """The size of each axis, outermost first."""
    placed = [(_DATA_ORDER + place, axis, size) for place, (axis, size) in enumerate(data.items())]
    placed += [(plugin.traits.order, plugin.traits.axis, sizes[name]) for name, plugin in plugins.items()]
    return {axis: size for _, axis, size in sorted(placed)}


@dataclass(frozen=True)
class Meshes:
    """model: over which parameters are spread (Layout.model_axes). ranks: with every axis of the layout."""

    model: DeviceMesh
    ranks: DeviceMesh
    data_axes: tuple[str, ...]

    @property
    def data(self) -> DeviceMesh:
        """The data axes, as the sharding strategy sees them."""
        return self.model[self.data_axes]

    def axis(self, axis: str) -> DeviceMesh:
        """The one-dimensional mesh of an axis."""
        return self.model[axis] if axis in (self.model.mesh_dim_names or ()) else self.ranks[axis]

    @property
    def data_rank(self) -> int:
        """This rank's place among those that see different samples."""
        place = 0
        for axis in self.data_axes:
            place = place * self.ranks[axis].size() + self.ranks[axis].get_local_rank()
        return place

    def batch_group(self) -> dist.ProcessGroup:
        """The ranks that hold different parts of one global batch."""
        if self.data.size() == dist.get_world_size():
            group = dist.group.WORLD
            assert group is not None
            return group
        return flatten_mesh(self.data, "batch").get_group()


def build_meshes(layout: Layout, device: torch.device) -> Meshes:
    """The meshes over all ranks; collective."""
    model = _mesh(layout.model_axes, device)
    ranks = model if layout.axes == layout.model_axes else _mesh(layout.axes, device)
    return Meshes(model, ranks, layout.data_axes)


def _mesh(axes: dict[str, int], device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
