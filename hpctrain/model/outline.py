"""The module between the steps of its building: no plugin may rename, reshape or freeze a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.contracts.model import ModelSpec
from hpctrain.contracts.parallelism import Parallelism
from hpctrain.contracts.plugin import Plugin, broken
from hpctrain.ranks.json_collectives import gather_values


@dataclass(frozen=True)
class Outline:
    """The parameters of a module: the full shape of each, whether it is trained, and the mesh axes that cut it."""

    parameters: Mapping[str, tuple[tuple[int, ...], bool]]
    axes: Mapping[str, tuple[str, ...]]

    @staticmethod
    def of(module: nn.Module) -> Outline:
        """The outline of `module` as it lies on this rank."""
        named = dict(module.named_parameters())
        return Outline({name: (tuple(p.shape), p.requires_grad) for name, p in named.items()}, _axes(named))

    def refuse_change(self, plugin: Plugin, method: str, module: nn.Module, may_lack: bool = False) -> None:
        """Raises ContractError if `method` has changed a name, a shape or what is trained. may_lack: whether parameters may lie
        on other ranks only."""
        now = Outline.of(module)
        lost = [] if may_lack else [name for name in self.parameters if name not in now.parameters]
        new = [name for name in now.parameters if name not in self.parameters]
        if lost or new:
            told = " and ".join([f"took away {lost[0]!r}"] * bool(lost) + [f"added {new[0]!r}"] * bool(new))
            raise broken(plugin, f"{told} in {method}", "the parameters that the model had, under their names")
        for name, (shape, trained) in now.parameters.items():
            before, was_trained = self.parameters[name]
            if shape != before:
                wanted = f"{before}: a part of a parameter is a DTensor with the full shape"
                raise broken(plugin, f"gave {name} the shape {shape} in {method}", wanted)
            if trained != was_trained:
                raise broken(plugin, f"changed requires_grad of {name} in {method}", f"{was_trained}, as [model] says")
            dropped = set(self.axes.get(name, ())) - set(now.axes.get(name, ()))
            if dropped:
                found = f"cut {name} in {method} anew, which the axis {', '.join(dropped)} had cut"
                raise broken(plugin, found, "a DTensor over both axes, or a plan in which one of them leaves it whole")


def _axes(named: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    cut = {name: p for name, p in named.items() if isinstance(p, DTensor)}
    return {
        name: tuple(
            axis
            for axis, how in zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=True)
            if not how.is_replicate()
        )
        for name, p in cut.items()
    }


def refuse_own_parameters(plugin: Parallelism, module: nn.Module) -> None:
    """Raises ContractError if an axis whose ranks have parts of samples cuts parameters and doesn't say so in its traits."""
    traits = plugin.traits
    if not traits.cuts_samples or traits.has_own_parameters:
        return
    own = [name for name, axes in _axes(dict(module.named_parameters())).items() if traits.axis in axes]
    if own:
        found = f"cut {own[0]} over the axis {traits.axis}, whose ranks have {traits.ranks_have}"
        raise broken(
            plugin, found, "the trait has_own_parameters, or its gradient would be summed over other parameters"
        )


def refuse_blocks(spec: ModelSpec, module: nn.Module) -> None:
    """Raises ContractError for blocks that are none of the module's, or lie in one another."""
    blocks, known = spec.blocks(module), {id(one) for one in module.modules()}
    if any(id(block) not in known for block in blocks):
        raise broken(spec, "gave a block that is no part of the module", "modules of the module that blocks() is given")
    of_blocks = {id(block) for block in blocks}
    nested = any(id(inner) in of_blocks for block in blocks for inner in block.modules() if inner is not block)
    if nested or len(of_blocks) < len(blocks):
        raise broken(spec, "gave a block twice, or one that another holds", "blocks that follow one another, each once")


def refuse_other_model(spec: ModelSpec, module: nn.Module) -> None:
    """Raises ContractError on all ranks unless all have built the same parameters. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = [[name, list(shape)] for name, (shape, _) in Outline.of(module).parameters.items()]
    if len(set(gather_values(sha256(repr(mine).encode()).hexdigest()))) == 1:
        return
    everyone: list[list[Any]] = gather_values(mine)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            ours, theirs = _first_difference(everyone[0], other)
            found = f"built another model on rank {rank}: {theirs}, where rank 0 has {ours}"
            raise broken(spec, found, "a model that depends on its options alone")


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> tuple[str, str]:
    place = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    def told(of: Sequence[Any]) -> str:
        return f"{of[place][0]} {tuple(of[place][1])}" if place < len(of) else "no further parameter"

    return told(one), told(other)
