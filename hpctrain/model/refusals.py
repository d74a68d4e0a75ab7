"""Refuses models that a job can't train, and plugins that change a model between the steps of its building."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import torch.distributed as dist
from torch import nn

from hpctrain.base.errors import UsageError, shown
from hpctrain.contracts.compression import LossyCompression
from hpctrain.contracts.model import MetaModel, ModelSpec
from hpctrain.contracts.pieces import cut_axes
from hpctrain.contracts.plugin import Plugin, broken
from hpctrain.job.parts import Parts
from hpctrain.ranks.json_collectives import gather_values

# the relative difference between ranks' norms of one gradient: each rank sums the same numbers
_ALIKE = 1e-3

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def refuse_unsaved_buffers(module: nn.Module, spec: ModelSpec) -> None:
    """Raises UsageError for buffers that nobody would initialize: on the meta device no tensor has values."""
    saved = module.state_dict(keep_vars=True).keys()
    unsaved = [name for name, buffer in module.named_buffers() if name not in saved and buffer.is_meta]
    if isinstance(spec, MetaModel) and unsaved:
        raise UsageError(
            f"[model] {spec.name}: its buffer{'s' * (len(unsaved) > 1)} {', '.join(unsaved[:3])} would have no values: a "
            "MetaModel initializes only parameters and persistent buffers; register with persistent=True and "
            "initialize, or make on the CPU in build, or compute in forward, or derive from ModelSpec"
        )


def refuse_embeddings(module: nn.Module, spec: ModelSpec, data_ranks: int) -> None:
    """Raises UsageError for embeddings that would train differently on several ranks."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = [(name or type(one).__name__, one) for name, one in module.named_modules() if isinstance(one, kinds)]
    sparse = [name for name, one in found if one.sparse]
    if sparse:
        raise UsageError(
            f"[model] {spec.name}: {', '.join(sparse)} makes sparse gradients, but gradients are summed over ranks in dense "
            "buffers; build it with sparse = False"
        )
    scaled = [name for name, one in found if one.max_norm is not None]
    if scaled and data_ranks > 1:
        raise UsageError(
            f"[model] {spec.name}: {', '.join(scaled)} with max_norm changes its weight in forward, each rank for its own samples: "
            f"{data_ranks} data-parallel ranks would diverge; build it without max_norm, and scale its output"
        )


def has_batch_norms(module: nn.Module) -> bool:
    """Whether there is something to synchronize."""
    return any(isinstance(one, BATCH_NORMS) for one in module.modules())


def refuse_batch_norms(module: nn.Module, name: str) -> None:
    """Raises UsageError unless the model `name` has batch norms, all of them torch's own."""
    norms = [one for one in module.modules() if isinstance(one, BATCH_NORMS)]
    other = next((one for one in norms if type(one) not in BATCH_NORMS), None)
    if other is not None:
        raise UsageError(
            f"[model] sync_batch_norm: the model {name!r} has a {type(other).__name__}, a BatchNorm with code of its own, which "
            "would go on to normalize one rank's micro batch; expected torch's own BatchNorm1d, 2d or 3d"
        )
    if not norms:
        raise UsageError(f"[model] sync_batch_norm: the model {name!r} has no BatchNorm; leave the key out")


def refuse_untrained(spec: ModelSpec, trained: Sequence[str]) -> None:
    """Raises UsageError for a model without a parameter to train."""
    if not trained:
        raise UsageError(
            f"[model] {spec.name}: it has no parameter to train: expected one at least with requires_grad = True"
        )


Outline = Mapping[str, tuple[tuple[int, ...], bool, set[str]]]
"""The parameters of a module: the full shape of each, whether it is trained, and the mesh axes that cut it."""


def outline_of(module: nn.Module) -> Outline:
    """The outline of `module` as it lies on this rank."""
    return {name: (tuple(p.shape), p.requires_grad, {*cut_axes(p)}) for name, p in module.named_parameters()}


def refuse_change(before: Outline, plugin: Plugin, method: str, module: nn.Module, may_lack: bool = False) -> Outline:
    """The outline now. Raises ContractError if `method` has changed a name, a shape or what is trained, or undone a cut.

    may_lack: whether parameters may lie on other ranks only.
    """
    now = outline_of(module)
    lost = set() if may_lack else before.keys() - now.keys()
    if lost or now.keys() - before.keys():
        names = ", ".join(sorted(lost or now.keys() - before.keys())[:3])
        raise broken(
            plugin, f"{'took away' if lost else 'added'} {names} in {method}", "the parameters and names of the model"
        )
    for name, (shape, is_trained, axes) in now.items():
        old_shape, was_trained, old_axes = before[name]
        if shape != old_shape:
            expected = f"{old_shape}: a part of a parameter is a DTensor with the full shape"
            raise broken(plugin, f"gave {name} the shape {shape} in {method}", expected)
        if is_trained != was_trained:
            raise broken(plugin, f"changed requires_grad of {name} in {method}", f"{was_trained}, as [model] says")
        if old_axes - axes:
            undone = f"cut {name} in {method} anew, which the axis {', '.join(old_axes - axes)} had cut"
            raise broken(plugin, undone, "a DTensor over both axes, or a plan in which one of them leaves it whole")
    return now


def refuse_other_model(spec: ModelSpec, module: nn.Module) -> None:
    """Raises ContractError on all ranks unless all have built the same parameters. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = [[name, list(parameter.shape)] for name, parameter in module.named_parameters()]
    if len(set(gather_values(sha256(repr(mine).encode()).hexdigest()))) == 1:  # names of all ranks would be megabytes
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


def refuse_different_norms(parts: Parts, norms: Sequence[float], scale: float) -> None:
    """Raises ContractError on all ranks unless the full gradient has one norm. norms: of each rank. scale: of this rank's loss."""
    if max(norms) - min(norms) <= _ALIKE * max(norms):
        return
    scales = sorted(set(gather_values(scale)))  # collective: all ranks see the same norms, so all come here
    if len(scales) > 1:
        raise broken(parts.precision, f"scales the loss by {shown(scales)} on the ranks", "one scale on all")
    by_size = ", ".join(f"{norm:.4g}" for norm in sorted(set(norms))[:4])
    left = f"left other gradients on each rank, whose norms are {by_size}"
    if isinstance(parts.compression, LossyCompression):
        raise broken(parts.compression, left, "one sum, with the same bits on all ranks")
    shared = [plugin.name for plugin in parts.parallelism.values() if plugin.traits.ranks_have == "the same samples"]
    axes = f"; or the ranks of {' or '.join(shared)} have other samples, which its traits deny" if shared else ""
    raise broken(parts.sharding, left, f"one sum on all ranks{axes}")
