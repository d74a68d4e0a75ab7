"""Refuses models that a job can't train, and plugins that change a model between the steps of its building."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import UsageError
from hpctrain.contracts.model import MetaModel, ModelSpec
from hpctrain.contracts.parallelism import Parallelism
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.plugin import Plugin, broken
from hpctrain.contracts.sharding import Sharding
from hpctrain.model.mesh import Meshes
from hpctrain.ranks.json_collectives import gather_values

# sums of such remainders over pieces and ranks fit into int64
_MODULUS = 2**40

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


def has_dims(shape: Sequence[int], entry: Mapping[str, Any]) -> bool:
    """Whether a parameter of this shape may belong to an entry of [[optimizer.groups]]."""
    return entry["max_dims"] is None or len(shape) <= entry["max_dims"]


def refuse_unmatched(trained: Mapping[str, Sequence[int]], patterns: Sequence[dict[str, Any]]) -> None:
    """Raises UsageError for a pattern that matches none of the trained parameters, which are given with their shapes."""
    for entry in patterns:
        names = [name for name, shape in trained.items() if has_dims(shape, entry)]
        for pattern in entry["pattern"]:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                of = "" if entry["max_dims"] is None else f" of at most max_dims = {entry['max_dims']} dimensions"
                raise UsageError(
                    f"[[optimizer.groups]]: no trained parameter{of} matches the pattern {pattern!r}; the names are like "
                    f"{', '.join((names or list(trained))[:5])}, ..."
                )


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


def refuse_holes(
    plugin: Sharding, pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]], meshes: Meshes
) -> None:
    """Raises ContractError unless the pieces of all ranks hold every element of the trained parameters once, but for replicas.

    Compares the number of elements and the sum of their places, each modulo 2**40. Collective over all ranks.
    """
    names = {name: row for row, name in enumerate(shapes)}
    found = torch.zeros(len(names), 2, dtype=torch.int64)
    odd = 0
    for piece in pieces:
        if not _is_within(piece, shapes.get(piece.name)):
            odd += 1
        elif meshes.counts(piece.axes):
            count, places = len_and_places(piece.shape, piece.offsets, tuple(piece.tensor.shape))
            found[names[piece.name]] += torch.tensor([count % _MODULUS, places % _MODULUS])
    totals = torch.cat([found.view(-1), torch.tensor([odd])])
    dist.all_reduce(totals)
    if odd := int(totals[-1]):
        outside = f"gave {odd} pieces outside of the trained parameters"
        raise broken(plugin, outside, "their names, shapes and offsets")
    for (name, shape), (count, places) in zip(shapes.items(), totals[:-1].view(-1, 2).tolist(), strict=True):
        elements, sum_of_places = len_and_places(shape, (0,) * len(shape), shape)
        differs = bool((count - elements) % _MODULUS)
        if differs or (places - sum_of_places) % _MODULUS:
            told = f"{count:,} of" if differs else "some elements twice and others never among the"
            holes = f"gave pieces with {told} {elements:,} elements of {name}"
            raise broken(plugin, holes, "each element once, but for replicas")


def len_and_places(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """The elements of a rectangle of a tensor, and the sum of their places in its row-major order."""
    total, stride, places = prod(lengths), prod(shape), 0
    for size, begin, length in zip(shape, offsets, lengths, strict=True):
        stride //= size or 1
        places += stride * (length * begin + length * (length - 1) // 2) * (total // length if length else 0)
    return total, places


def _is_within(piece: Piece, shape: tuple[int, ...] | None) -> bool:
    lengths = tuple(piece.tensor.shape)
    if shape is None or tuple(piece.shape) != shape or len(lengths) != len(shape) or len(piece.offsets) != len(shape):
        return False
    return all(at >= 0 and at + n <= size for at, n, size in zip(piece.offsets, lengths, shape, strict=True))
