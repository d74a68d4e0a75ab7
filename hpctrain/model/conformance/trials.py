"""Trials of what a plugin made, on a few random numbers, before the first step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.contracts.buckets import GradientBucket, Span
from hpctrain.contracts.communicator import Communicator
from hpctrain.contracts.compression import Compressor, LossyCompression
from hpctrain.contracts.optimization import Optimizer, Schedule
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.plugin import broken
from hpctrain.contracts.precision import LossScaler, Precision
from hpctrain.ranks.json_collectives import gather_values

Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_LR = 0.01
_TOLERANCE = 1e-3
"""Relative to the largest change; rounding errors are below a thousandth of it."""
_HAVING = 4
"""Ranks that have a gradient in the trial of a compressor."""


def refuse_idle_optimizer(plugin: Optimizer, build: Build) -> None:
    """Raises ContractError for an optimizer whose steps change nothing, or that keeps state where no checkpoint finds it.

    Does nothing if the trial itself fails: a third party's optimizer may need a GPU, or other shapes.
    """
    values, *gradients = _random(4)
    try:
        with torch.random.fork_rng(devices=[]):
            changes = _changes(build, values, gradients[:2], 1)
            same = _goes_on_alike(build, values, gradients)
    except Exception:
        return
    if not changes.any():
        raise broken(
            plugin,
            "changed nothing in two steps on random gradients",
            "a `step` that updates each parameter with a gradient",
        )
    if not same:
        found = "makes another step after its state and its groups' numbers were put into a new optimizer"
        raise broken(plugin, found, "everything that lasts from step to step in `state` or in the groups")


def updates_parts_alike(build: Build) -> bool:
    """Whether an optimizer changes half of a matrix as it changes that half within the whole, in two steps on random values.

    An optimizer that reads the whole matrix (Muon, LAMB) gives another result on each layout. If the trial itself fails, or
    compares random numbers, the answer is True.
    """
    values, *gradients = _random(3)
    try:
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            whole, halves = (_changes(build, values, gradients, count) for count in (1, 2))
            draws = not torch.equal(before, torch.get_rng_state())
    except Exception:  # a third party's optimizer may need a GPU, or other shapes
        return True
    return draws or bool((whole - halves).abs().max() <= _TOLERANCE * whole.abs().max())


def _random(count: int) -> Tensor:
    """(count, 8, 6)"""
    return 0.1 * torch.randn(count, 8, 6, dtype=torch.float32, generator=torch.Generator().manual_seed(0))


def _changes(build: Build, values: Tensor, gradients: list[Tensor], count: int) -> Tensor:
    """The change after some steps of a matrix that is split into `count` parameters."""
    parts = [nn.Parameter(part.clone()) for part in values.chunk(count)]
    optimizer = build([{"params": parts, "lr": _LR}])
    for gradient in gradients:
        for part, share in zip(parts, gradient.chunk(count), strict=True):
            part.grad = share.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts]) - values


def _goes_on_alike(build: Build, values: Tensor, gradients: list[Tensor]) -> bool:
    """Whether a new optimizer with the state of another one makes the same step."""
    first = nn.Parameter(values.clone())
    optimizer = build([{"params": [first], "lr": _LR}])
    for gradient in gradients[:-1]:
        first.grad = gradient.clone()
        optimizer.step()
    second = nn.Parameter(first.detach().clone())
    other = build([{"params": [second], "lr": _LR}])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = first.detach().clone()
    for parameter, one in ((first, optimizer), (second, other)):
        parameter.grad = gradients[-1].clone()
        torch.default_generator.manual_seed(0)  # as a run seeds what a step draws
        one.step()
    difference, change = (first - second).abs().max(), (first - before).abs().max()
    overflows = not change.isfinite()  # with a weight decay of 1e16, say: such numbers tell nothing
    return overflows or bool(difference <= _TOLERANCE * change)


def refuse_impure_schedule(plugin: Schedule, steps: int) -> None:
    """Raises ContractError unless the factors of the first and the last step are numbers, whatever was asked before."""
    asked = [step for step in (0, steps - 1, 1, 0, steps - 1) if 0 <= step < steps]
    found: dict[int, float] = {}
    for step in asked:
        factor = plugin.factor(step, steps)
        refuse_factor(plugin, step, factor)
        if found.setdefault(step, factor) != factor:
            told = f"gave the factor {factor:g} for step {step}, and {found[step]:g} before"
            raise broken(plugin, told, "a pure function of the step, so that a resume has nothing to restore")


def refuse_factor(plugin: Schedule, step: int, factor: object) -> None:
    """Raises ContractError for a factor on lr that is none."""
    if not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
        raise broken(plugin, f"gave the factor {factor!r} for step {step}", "a number that is zero or more")


def refuse_lossy_scaler(plugin: Precision, scaler: LossScaler) -> None:
    """Raises ContractError unless a scaler restored from its `state` scales as it does."""
    other = plugin.start()
    other.restore(scaler.state())
    if other.scale != scaler.scale or other.state() != scaler.state():
        found = f"has a loss scaler of scale {scaler.scale:g}, which is {other.scale:g} once restored from its state()"
        raise broken(plugin, found, "everything that a resume needs in state()")


def try_communicator(plugin: Communicator, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Raises ContractError unless the collectives of `group`, all ranks by default, give what they must on small tensors.
    Collective."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if size == 1:
        return
    # small whole numbers: float32 adds them exactly in any order, up to 400,000 ranks
    places = torch.arange(size, device=device)
    each, factors = (places % 7 + 1).float(), (places % 5 + 1).float()
    mine, whole = each * factors[rank], each * factors.sum()
    summed = mine.clone()
    dist.all_reduce(summed, group=group)
    share = torch.empty(1, dtype=torch.float32, device=device)
    dist.reduce_scatter_single(share, mine.clone(), group=group)
    gathered = torch.empty(size, dtype=torch.float32, device=device)
    dist.all_gather_single(gathered, mine[:1].contiguous(), group=group)
    sent = mine.clone()
    dist.broadcast(sent, group=group, group_src=size - 1)
    for what, found, wanted in (
        ("all_reduce", summed, whole),
        ("reduce_scatter", share, whole[rank : rank + 1]),
        ("all_gather", gathered, factors),
        ("broadcast", sent, each * factors[-1]),
    ):
        wrong = (found != wanted).nonzero().flatten().tolist()
        if wrong:
            told = f"has a backend whose {what} gave {float(found[wrong[0]]):g} as element {wrong[0]} on rank {rank} of {size}"
            raise broken(plugin, told, f"{float(wanted[wrong[0]]):g}")


def try_compressor(plugin: LossyCompression, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises ContractError unless a compressor's sum is one, equal on all ranks, and repeatable from `state`. Collective over
    `group`."""
    draw = torch.Generator().manual_seed(0)
    left, right = (1 + 0.4 * torch.rand(16, dtype=torch.float32, generator=draw) for _ in range(2))
    signs = torch.where(torch.rand(16, dtype=torch.float32, generator=draw) < 0.5, -1.0, 1.0).float()
    flat = torch.outer(left, right * signs).reshape(-1).to(device)  # of rank 1, and no element is small
    piece = Piece.whole("trial", flat.view(16, 16))
    bucket = GradientBucket([Span(piece, 0)], flat.numel(), flat.dtype, flat.device)
    compressor, having = plugin.compressor(bucket, group), min(group.size(), _HAVING)
    if group.rank() >= having:
        flat = torch.zeros_like(flat)  # sums of many equal numbers in 16 bits stop growing
    with torch.no_grad():
        kept = [tensor.clone() for tensor in compressor.state()]
        first = _summed(compressor, flat)
        _put_back(compressor, kept)
        again = _summed(compressor, flat)
        _put_back(compressor, kept)
        spoiled = flat.clone()
        spoiled[0] = math.inf if group.rank() == 0 else 0.0
        bad = _summed(compressor, spoiled)
    everyone: list[list[float]] = gather_values([float(first.double().sum()), float(first.double().abs().sum())], group)
    if any(one != everyone[0] for one in everyone):
        raise broken(
            plugin,
            f"left sums that differ between ranks: {sorted({one[0] for one in everyone})}",
            "the same bits on all",
        )
    if not torch.equal(first, again):
        found = "gave another sum for the same gradients after its state() was put back"
        raise broken(
            plugin, found, "all that lasts from step to step in state(), such as the residual of error feedback"
        )
    sent = first != 0
    ratio = float((first * flat)[sent].sum() / (flat * flat)[sent].sum()) if sent.any() else 0.0
    if group.rank() < having and ratio < 0.75 * having:
        raise broken(plugin, f"gave {ratio:.2f} times the gradients that {having} ranks had alike", "their sum")
    if bool(bad.isfinite().all()):
        raise broken(
            plugin, "gave a finite sum where a rank's gradient was infinite", "a sum that is not finite, on all ranks"
        )


def _summed(compressor: Compressor, gradients: Tensor) -> Tensor:
    made = gradients.clone()
    compressor.all_reduce(made, 1.0)
    return made


def _put_back(compressor: Compressor, kept: list[Tensor]) -> None:
    for live, value in zip(compressor.state(), kept, strict=True):
        live.copy_(value)
