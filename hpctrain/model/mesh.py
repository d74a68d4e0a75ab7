"""The layout of the ranks: the mesh axes, their DeviceMesh, and the plan that plugins check."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hpctrain.base.errors import EnvironmentUnfitError, UsageError, name_ranks, reason
from hpctrain.base.torch_private import flatten_mesh
from hpctrain.contracts.plan import Plan
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job

if TYPE_CHECKING:
    from hpctrain.contracts.parallelism import Parallelism

# the place of the outermost data axis; the others follow it
_DATA_ORDER = 20


@dataclass(frozen=True)
class Layout:
    """The layout of the ranks.

    axes: the size of each axis, outermost first, always with the data axes. model_axes: the axes over which the model is
    spread. These lack axes that cut samples (context parallelism): for the sharding strategy the ranks of such an axis are
    data-parallel, so they belong to a data axis. data_axes: the axes into which the strategy cuts the data-parallel ranks.
    own_axes: the axes that cut samples and have parameters of their own (AxisTraits.has_own_parameters).
    """

    axes: dict[str, int]
    model_axes: dict[str, int]
    data_axes: tuple[str, ...]
    own_axes: tuple[str, ...] = ()

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
            f"[parallelism]: {asked} needs a multiple of {others * replicate} ranks, but there are {world_size}; "
            "start another number of ranks or change the sizes"
        )
    cutting = {name for name, plugin in parts.parallelism.items() if plugin.traits.cuts_samples}
    cut = prod(sizes[name] for name in cutting)
    data_ranks = world_size // others
    data, spread_data = (parts.sharding.axes(ranks, replicate) for ranks in (data_ranks, data_ranks * cut))
    spreading = {name: plugin for name, plugin in parts.parallelism.items() if name not in cutting}
    axes, model_axes = _in_order(data, parts.parallelism, sizes), _in_order(spread_data, spreading, sizes)
    own = [parts.parallelism[name].traits for name in cutting]
    return Layout(axes, model_axes, tuple(data), tuple(one.axis for one in own if one.has_own_parameters))


def _in_order(data: dict[str, int], plugins: dict[str, Parallelism], sizes: dict[str, int]) -> dict[str, int]:
    """The size of each axis, outermost first."""
    placed = [(_DATA_ORDER + place, axis, size) for place, (axis, size) in enumerate(data.items())]
    placed += [(plugin.traits.order, plugin.traits.axis, sizes[name]) for name, plugin in plugins.items()]
    return {axis: size for _, axis, size in sorted(placed)}


@dataclass(frozen=True)
class Meshes:
    """model: the mesh over which parameters are spread (Layout.model_axes). ranks: the mesh with every axis of the layout.
    own_groups: for a data axis and an axis with parameters of its own, the data axis's ranks at this rank's place on the other."""

    model: DeviceMesh
    ranks: DeviceMesh
    data_axes: tuple[str, ...]
    own_groups: Mapping[tuple[str, str], dist.ProcessGroup]

    @property
    def data(self) -> DeviceMesh:
        """The data axes, as the sharding strategy sees them."""
        return self.model[self.data_axes]

    def axis(self, axis: str) -> DeviceMesh:
        """The one-dimensional mesh of an axis."""
        return self.model[axis] if axis in (self.model.mesh_dim_names or ()) else self.ranks[axis]

    def group(self, axis: str, piece_axes: Sequence[str]) -> dist.ProcessGroup:
        """The ranks of an axis that have replicas, or other parts, of what pieces with these axes have here."""
        own = [one for one in piece_axes if (axis, one) in self.own_groups]
        return self.own_groups[axis, own[0]] if own else self.axis(axis).get_group()

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """The groups of several ranks by their axes, in the same order on all ranks."""
        axes = [axis for mesh in (self.model, self.ranks) for axis in mesh.mesh_dim_names or ()]
        found = {axis: self.axis(axis).get_group() for axis in axes}
        found |= {f"{axis} beside {own}": group for (axis, own), group in self.own_groups.items()}
        return {name: group for name, group in found.items() if group.size() > 1}

    def counts(self, piece_axes: Sequence[str]) -> bool:
        """Whether this rank is the first one that has what pieces with these axes have here."""
        repeating = [axis for axis in self.model.mesh_dim_names or () if axis not in piece_axes]
        return all(self.group(axis, piece_axes).rank() == 0 for axis in repeating)

    @property
    def data_rank(self) -> int:
        """This rank's place among the ranks that see different samples."""
        place = 0
        for axis in self.data_axes:
            place = place * self.ranks[axis].size() + self.ranks[axis].get_local_rank()
        return place

    @property
    def data_size(self) -> int:
        """The number of ranks that see different samples."""
        return prod(self.ranks[axis].size() for axis in self.data_axes)

    def batch_group(self) -> dist.ProcessGroup:
        """The ranks that hold different parts of one global batch."""
        if self.data.size() == dist.get_world_size():
            group = dist.group.WORLD
            assert group is not None
            return group
        return flatten_mesh(self.data, "batch").get_group()


def build_meshes(layout: Layout, device: torch.device) -> Meshes:
    """The meshes over all ranks, with groups that are connected; collective."""
    meshes = unconnected_meshes(layout, device)
    _connect(meshes, device)
    return meshes


def unconnected_meshes(layout: Layout, device: torch.device) -> Meshes:
    """The meshes over all ranks, whose groups connect at their first use; collective."""
    model = _mesh(layout.model_axes, device)
    ranks = model if layout.axes == layout.model_axes else _mesh(layout.axes, device)
    own = {
        (axis, one): _own_group(model, ranks, axis, one) for axis in layout.data_axes for one in sorted(layout.own_axes)
    }
    return Meshes(model, ranks, layout.data_axes, own)


_LOST = re.compile(r"remote process|clos|reset|refused|peer|time[d ]*out", re.IGNORECASE)


def _connect(meshes: Meshes, device: torch.device) -> None:
    """Sum over each group: backends connect at the first use, which without this is in the middle of the first backward."""
    for axis, group in meshes.groups().items():
        ranks, count = dist.get_process_group_ranks(group), torch.ones((), device=device)
        try:
            dist.all_reduce(count, group=group)
            found = count.item()
        except dist.DistBackendError as error:
            if _LOST.search(str(error)):  # another rank has ended, and says why
                raise
            why = f"the ranks of {axis}, {name_ranks(ranks)}, can't communicate on {device.type}: {reason(error)}"
            raise EnvironmentUnfitError(why) from error
        if found != len(ranks):
            raise EnvironmentUnfitError(
                f"the ranks of {axis}, {name_ranks(ranks)}, each gave 1 to a sum on {device.type}: found {found:g}, expected "
                f"{len(ranks)}"
            )


def group_apart(mesh: DeviceMesh, axis: str) -> dist.ProcessGroup:
    """Another group of this rank's neighbours on an axis of a mesh of all ranks; collective over the world."""
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(_lines(mesh, axis))[0]
    return group


def _lines(mesh: DeviceMesh, axis: str) -> list[list[int]]:
    """The ranks of each of an axis's groups."""
    place = (mesh.mesh_dim_names or ()).index(axis)
    lines: list[list[int]] = mesh.mesh.movedim(place, -1).reshape(-1, mesh.size(place)).tolist()
    return lines


def _own_group(model: DeviceMesh, ranks: DeviceMesh, axis: str, own: str) -> dist.ProcessGroup:
    """This rank's neighbours on the data axis that have the same place on the axis `own`; collective over the world."""
    place_of = {rank: place for line in _lines(ranks, own) for place, rank in enumerate(line)}
    places = range(ranks[own].size())
    apart = [[rank for rank in line if place_of[rank] == place] for line in _lines(model, axis) for place in places]
    apart = [members for members in apart if members]
    group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(apart, group_desc=f"{axis} beside {own}")[0]
    return group


def _mesh(axes: dict[str, int], device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def plan_of(job: Job, parts: Parts, outline: nn.Module | None, layout: Layout | None) -> Plan:
    """The plan. layout: None if the number of ranks is unknown, or if the axes don't fit it."""
    plan = Plan(
        tables=job.model_dump(),
        model=parts.model,
        outline=outline,
        parallelism=parts.parallelism,
        sizes={name: job.parallelism[name].size for name in parts.parallelism},
        sharding=parts.sharding,
        precision=parts.precision,
        activation_checkpointing=parts.activation_checkpointing,
    )
    if layout is None:
        return plan
    return replace(
        plan,
        axes=layout.axes,
        model_axes=layout.model_axes,
        data_axes=layout.data_axes,
        data_ranks=layout.data_ranks,
        micro_batches=_micro_batches(job, layout),
    )


def _micro_batches(job: Job, layout: Layout) -> int | None:
    size, micro_size = job.batch.global_size, job.batch.micro_size
    if size is None or micro_size is None or size % (layout.data_ranks * micro_size):
        return None
    return size // (layout.data_ranks * micro_size)
