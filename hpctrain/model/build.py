"""Builds the model on this rank, in the order that docs/decisions/0014 explains."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.base.errors import UsageError
from hpctrain.base.random_numbers import derive_seed
from hpctrain.base.torch_private import buffers_of, convert_tensors
from hpctrain.contracts.model import MetaModel, ModelSpec
from hpctrain.contracts.pieces import Piece, pieces_of
from hpctrain.model.mesh import Meshes
from hpctrain.model.parameters import freeze, named_tensors, tie, tied_parameters
from hpctrain.model.refusals import (
    outline_of,
    refuse_change,
    refuse_embeddings,
    refuse_other_model,
    refuse_unsaved_buffers,
    refuse_untrained,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from hpctrain.contracts.compression import GradientSums
    from hpctrain.contracts.parallelism import AppliedAxis
    from hpctrain.contracts.sharding import ShardedModel
    from hpctrain.job.parts import Parts
    from hpctrain.job.tables import Job


@dataclass(frozen=True)
class Built:
    """The model on this rank."""

    sharded: ShardedModel
    axes: list[AppliedAxis]
    """Outermost first."""
    trained: dict[str, tuple[int, ...]]
    """Name and shape of each trained parameter of the full model, before any cut."""
    elements: int
    """The number of elements of all parameters of the full model."""
    tied: list[list[str]]
    """The names of each tied parameter of the full model, its main name first."""
    given: frozenset[str]
    """The names of the frozen parameters that checkpoints leave out."""


class InitialValues:
    """The memory and the values of a model's parameters: drawn from the seed, the same for every layout."""

    are_real = True
    """Whether there are values, and ranks to compare them with."""

    def build(self, spec: ModelSpec, seed: int) -> nn.Module:
        """The full module: on the meta device, or with values that are those of rank 0. Collective."""
        module = build_on_meta(spec) if isinstance(spec, MetaModel) else _under_seed(spec, seed)
        refuse_other_model(spec, module)
        if not isinstance(spec, MetaModel):
            _share_values(module)
        return module

    def fill(self, module: nn.Module, spec: ModelSpec, seed: int, home: torch.device) -> None:
        """Give this rank's part of the module its memory on `home`, and its values."""
        tied = tied_parameters(module)
        if isinstance(spec, MetaModel):
            materialize(module, home)
            tie(module, tied)  # materialization gave each place its own parameter
            initialize(module, spec, seed)
        module.to(device=home)
        tie(module, tied)  # on a device that torch knows by a plugin only, this gave each place its own, too


def build_model(
    job: Job,
    parts: Parts,
    meshes: Meshes,
    sums: GradientSums,
    device: torch.device,
    values: InitialValues,
    trains: bool = True,
) -> Built:
    """Build -> precision -> parallelism -> compile and activation checkpointing -> sharding -> materialize and initialize."""
    spec, dtype = parts.model, parts.precision.parameter_dtype
    with _default_dtype(dtype):
        module = values.build(spec, job.job.seed)
    refuse_unsaved_buffers(module, spec)
    refuse_embeddings(module, spec, meshes.data.size())
    _lay_out_in_rows(module)  # before anything keeps views of parameters
    freeze(module, job.model.freeze, job.model.trainable)
    if job.model.sync_batch_norm:
        from hpctrain.model.batch_norm import synchronize_batch_norms  # here: few jobs have the key

        synchronize_batch_norms(module, spec.name, meshes.batch_group())
    outline = outline_of(module)
    parts.precision.convert(module, spec)
    outline = refuse_change(outline, parts.precision, "convert", module)
    trained = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    if trains:
        refuse_untrained(spec, list(trained))
    elements = sum(parameter.numel() for parameter in module.parameters())
    tied, given = tied_parameters(module), given_names(spec, module)  # of the full model: axes take parameters away
    axes: list[AppliedAxis] = []
    # the pipeline last: tensor-parallel plans name modules of the full model
    for plugin in sorted(parts.parallelism.values(), key=lambda p: -p.traits.order):
        axes.append(plugin.apply(module, spec, meshes.axis(plugin.traits.axis)))
        module = axes[-1].module
        lacks = plugin.traits.ranks_have == "other parameters"
        outline = refuse_change(outline, plugin, "apply", module, lacks)
    alike = [meshes.axis(p.traits.axis) for p in parts.parallelism.values() if p.traits.repeats_activations]
    checkpointing = parts.activation_checkpointing
    if job.compile.enabled and not checkpointing.is_compiled:  # then the compiled block is recomputed as a whole
        _compile_blocks(module, spec, job.compile.mode)
    checkpointing.apply(module, spec, alike[0] if alike else None)
    outline = refuse_change(outline, checkpointing, "apply", module)
    if job.compile.enabled and checkpointing.is_compiled:  # then the compiler decides what of a block is kept
        _compile_blocks(module, spec, job.compile.mode)
    # fully_shard moves tensors of another device in place, which torch can't for every kind of device
    _place_buffers(module, device if values.are_real else torch.device("meta"))
    with parts.precision.forward(device):  # stage 3 asks autocast for the dtype that it gathers in
        sharded = parts.sharding.shard(module, spec, meshes.data, sums)
    module = sharded.module
    refuse_change(outline, parts.sharding, "shard", module)
    values.fill(module, spec, job.job.seed, parts.sharding.home(device))
    _place_buffers(module, device)
    sharded.materialized()
    return Built(sharded, axes[::-1], trained, elements, tied, given)


def given_names(spec: ModelSpec, module: nn.Module) -> frozenset[str]:
    """The frozen parameters of the full model whose values come from elsewhere than a checkpoint."""
    if not isinstance(spec, MetaModel):
        return frozenset()
    return frozenset(name for name, p in module.named_parameters() if not p.requires_grad and spec.is_given(name))


def source_of(spec: ModelSpec, seed: int, given: Collection[str]) -> str:
    """The fingerprint of where the `given` values come from; "" where there are none."""
    return spec.source(seed) if given and isinstance(spec, MetaModel) else ""


def build_whole(spec: ModelSpec, dtype: torch.dtype, seed: int) -> nn.Module:
    """The full module on the CPU, for weights to be loaded into: but for what is given, a MetaModel's parameters hold whatever lies
    in memory."""
    with _default_dtype(dtype):
        if not isinstance(spec, MetaModel):
            return _under_seed(spec, seed)
        module = build_on_meta(spec)
    refuse_unsaved_buffers(module, spec)
    tied = tied_parameters(module)
    given = given_names(spec, module)
    materialize(module, torch.device("cpu"))
    tie(module, tied)
    initialize(module, spec, seed, given)
    return module


def _compile_blocks(module: nn.Module, spec: ModelSpec, mode: str) -> None:
    for block in spec.blocks(module) or [module]:
        # replaces the bound method instead of wrapping the module, so parameter names do not change
        block.forward = torch.compile(block.forward, mode=mode)


def _place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers to the compute device, even if parameters are offloaded."""
    for inner in module.modules():
        buffers = buffers_of(inner)
        for name, buffer in buffers.items():
            if buffer is not None and not buffer.is_meta:
                buffers[name] = buffer.to(device)


def materialize(module: nn.Module, home: torch.device) -> None:
    """Give all tensors on the meta device memory on `home`; buffers that have values keep them."""
    buffers = [(inner, name, one) for inner in module.modules() for name, one in buffers_of(inner).items()]
    kept = [(inner, name, one) for inner, name, one in buffers if one is not None and not one.is_meta]
    module.to_empty(device=home)
    for inner, name, buffer in kept:
        buffers_of(inner)[name] = buffer


def initialize(module: nn.Module, spec: MetaModel, seed: int, names: Collection[str] | None = None) -> None:
    """Set the initial values of this rank's parts of all parameters and buffers, or of `names`. Tied ones use their first name."""
    with torch.no_grad():
        for name, tensor in named_tensors(module):
            if names is not None and name not in names:
                continue
            for piece in pieces_of(module, name, tensor):
                _fill(piece, spec, seed)


def _fill(piece: Piece, spec: MetaModel, seed: int) -> None:
    """Values are drawn in whole rows; a piece cut along another dim takes its part of the rows."""
    mine = piece.tensor
    rows = (piece.offsets[0], piece.offsets[0] + len(mine)) if mine.dim() else (0, 1)
    if mine.shape[1:] == piece.shape[1:]:
        if mine.numel():
            spec.initialize(piece.name, mine, rows, seed)
        return
    whole = mine.new_empty((len(mine), *piece.shape[1:]))
    spec.initialize(piece.name, whole, rows, seed)
    for dim in range(1, mine.dim()):  # columns of drawn rows
        whole = whole.narrow(dim, piece.offsets[dim], mine.shape[dim])
    mine.copy_(whole)


def _under_seed(spec: ModelSpec, seed: int) -> nn.Module:
    """Build the module with values, drawn from `seed`: equal on every rank."""
    with torch.random.fork_rng(devices=[]):  # a program goes on to draw as if nothing had been built
        torch.manual_seed(derive_seed(seed, "model"))
        module = spec.build()
    dtype = torch.get_default_dtype()

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_complex():
            return tensor.to(dtype.to_complex())
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    convert_tensors(module, cast)
    return module


def _share_values(module: nn.Module) -> None:
    """Give `module` rank 0's values: the user's code may draw from generators that no seed of ours covers. Collective."""
    for tensor in [*module.parameters(), *module.buffers()] if dist.get_world_size() > 1 else ():
        mine = tensor.detach().contiguous()
        # as bytes: not every backend knows every dtype, and a mask is bool
        dist.broadcast(mine.view(-1).view(torch.uint8), src=0)
        tensor.data = mine


def _lay_out_in_rows(module: nn.Module) -> None:
    """Make parameters contiguous (not channels last or transposed), as their gradients are in flat buckets.

    torch's fused optimizers assume the same memory layout for both, and fully_shard supports no other.
    """
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build_on_meta(spec: ModelSpec) -> nn.Module:
    """A new module on the meta device. Raises UsageError for sizes too large for torch."""
    try:
        with torch.device("meta"):
            return spec.build()
    except (RuntimeError, OverflowError) as error:
        raise UsageError(f"[model] {spec.name}: it cannot be built with these sizes: {error}") from error
