"""The module between the steps of its building: no plugin may rename, reshape or freeze a parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.base.devices import forked_random_state
from hpctrain.contracts.model import Batch, MetaModel, ModelSpec, trained_loss
from hpctrain.contracts.parallelism import Parallelism
from hpctrain.contracts.plugin import Plugin, broken
from hpctrain.plugins.user_code.model import UserModel
from hpctrain.ranks.json_collectives import gather_values

_ROWS = 4
_FEW = 2**20
"""Elements that a trial may draw."""
_MANY = 2**24
"""Elements of a sample's outputs up to which its loss is tried; more might not fit beside the activations."""
_OF_A_SUM = 0.05
"""Relative; in 16 bits, numbers are within a hundredth."""


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


def refuse_values_by_call(spec: MetaModel, module: nn.Module, seed: int) -> None:
    """Raises ContractError if the initial values of the smallest matrix depend on how its rows are asked for: each layout would
    start with other numbers."""
    known = [(name, p) for name, p in module.named_parameters() if p.dim() > 1 and len(p) > 1]
    name, like = min(known, key=lambda one: one[1].numel(), default=("", torch.empty(0)))
    rows = min(len(like), _ROWS)
    if not rows or rows * prod(like.shape[1:]) > _FEW:
        return
    whole = torch.empty((rows, *like.shape[1:]), dtype=like.dtype)
    apart = torch.empty_like(whole)
    with torch.no_grad():
        spec.initialize(name, whole, (0, rows), seed)
        for row in reversed(range(rows)):
            spec.initialize(name, apart[row : row + 1], (row, row + 1), seed)
    if not torch.equal(whole.nan_to_num(), apart.nan_to_num()):
        found = f"gave the rows 0 to {rows} of {name} other initial values together than one by one"
        raise broken(spec, found, "values that follow from seed, name and row alone")


def try_loss(spec: ModelSpec, outputs: Any, batch: Batch, device: torch.device) -> str:
    """Raises ContractError for a loss that is a mean where a sum is due: two equal samples have the loss of one. Returns a sentence
    on one that is a sum where a mean is due.

    Does nothing where there is no telling what a sample is, or the loss fails on it. Every rank that has outputs calls the loss as
    often, since it may communicate.
    """
    rows = {len(one) if one.dim() else 0 for one in (*_tensors(outputs), *_tensors(batch))}
    if len(rows) != 1 or 0 in rows or sum(one[:1].numel() for one in _tensors(outputs)) > _MANY:
        return ""
    try:
        tried = spec.apart() if isinstance(spec, UserModel) else spec
        once, twice = ((_repeated(outputs, count), _repeated(batch, count)) for count in (1, 2))
        with torch.no_grad(), forked_random_state(device):
            single, double = (_by_name(trained_loss(tried.loss(*one))) for one in (once, twice))
            counts = spec.count(once[1]), spec.count(twice[1])
    except Exception:  # a loss may need outputs of a kind, or all rows
        return ""
    if not counts[0] or counts[1] != 2 * counts[0]:
        return ""
    whole, whole_twice = sum(single.values()), sum(double.values())
    if abs(whole) > 1e-6 and abs(whole_twice - whole) <= 1e-3 * abs(whole):
        found = f"has the loss {whole:.4g} for a sample and {whole_twice:.4g} for it twice: a mean"
        raise broken(spec, found, "the sum over what `count` counts")
    for name, value in single.items():
        if abs(value) > 1e-6 and abs(double[name] - 4 * value) <= _OF_A_SUM * abs(value):
            told = f"{value / counts[0]:.4g} for a sample, {double[name] / counts[1]:.4g} for it twice"
            return (
                f"the loss{name} of {spec.name} grows with the number of samples ({told}): gradients change with [batch] "
                "micro_size and the ranks; a mean over the micro batch, or a loss for each row, does not"
            )
    return ""


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in plain dicts, lists and tuples; one without rows stands for anything else."""
    if type(value) in (Tensor, nn.Parameter):
        return [value]
    inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else [torch.empty(())]
    return [tensor for one in inner for tensor in _tensors(one)] if type(value) in (dict, list, tuple) else list(inner)


def _repeated(value: Any, count: int) -> Any:
    """The first row of each tensor, `count` times."""
    if isinstance(value, Tensor):
        return torch.cat([value.detach()[:1]] * count)
    if isinstance(value, dict):
        return {key: _repeated(one, count) for key, one in value.items()}
    return type(value)(_repeated(one, count) for one in value)


def _by_name(loss: Tensor | Mapping[str, Tensor]) -> dict[str, float]:
    named = {f" {name!r}": one for name, one in loss.items()} if isinstance(loss, Mapping) else {"": loss}
    return {name: float(one) for name, one in named.items()}
