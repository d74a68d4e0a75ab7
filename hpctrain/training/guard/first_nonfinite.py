"""Finds what was not finite first, after a step whose loss or gradient norm is not: healthy steps pay nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.errors import reason
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.life_cycle import LiveModel
from hpctrain.contracts.runner import MicroBatch
from hpctrain.ranks.json_collectives import gather_values

LOG = logging.getLogger("hpctrain")
SHOWN = 4
"""The most ranks that a sentence names."""


def first_nonfinite(model: LiveModel, losses: Sequence[float], identity: Identity) -> str:
    """Clauses about ranks, parameters and gradients that are not finite. Collective over all ranks.

    losses: each rank's part of the loss. The gradients are sums over the data-parallel ranks, so only a loss tells the rank.
    """
    order = {name: place for place, name in enumerate(model.shapes)}
    parameters = [order[one.name] for one in model.pieces if not _is_finite(one.tensor)]
    gradients = [
        order[one.name] for one in model.pieces if one.tensor.grad is not None and not _is_finite(one.tensor.grad)
    ]
    everyone = gather_values((identity.node, min(parameters, default=None), max(gradients, default=None)))
    names = list(model.shapes)
    told = []
    ranks = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
    if ranks:
        told.append("not finite is the loss of " + named_ranks(ranks, [node for node, _, _ in everyone]))
    else:
        told.append("the loss of each rank is finite")
    wrong = [one for _, one, _ in everyone if one is not None]
    if wrong:
        told.append(f"the first parameter that is not finite is {_placed(model, names[min(wrong)])}")
    ruined = [one for _, _, one in everyone if one is not None]
    if ruined:
        told.append(
            f"the first gradient in backward order that is not finite is that of {_placed(model, names[max(ruined)])}"
        )
    elif not wrong:
        told.append("each gradient is finite")
    return "; ".join(told)


def nonfinite_samples(micro_batches: Sequence[MicroBatch], indices: Sequence[Sequence[int]], kind: str) -> str | None:
    """A clause about the samples of a step, on any rank, that have nan or inf; None if there are none. Collective over all ranks.

    indices: of each micro batch's samples. kind: what the clause calls a sample. A value of -inf does not count: masks have it.
    """
    mine: list[list[Any]] = []
    try:
        mine += (
            [index, place, value]
            for micro, numbers in zip(micro_batches, indices, strict=True)
            for place, tensor in _entries(micro.batch)
            for index, value in _faults(tensor, numbers)
        )
    except Exception as error:  # a batch may hold any kind of tensor, and the step has its own end
        LOG.warning("the samples of the step cannot be looked at: %s", reason(error))
    found = [one for rank in gather_values(mine[:SHOWN]) for one in rank]
    if not found:
        return None
    index, place, value = min(found, key=lambda one: (one[2] != "nan", one[0], one[1]))
    others = {one[0] for one in found} - {index}
    return f"{kind} {index} has {value} in its {place}" + (
        f", and others have too, such as {min(others)}" if others else ""
    )


def _entries(batch: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The dense tensors of a batch that may have nan, complex ones as real, and the names of their places."""
    if isinstance(batch, Tensor):
        if batch.layout == torch.strided and not batch.is_nested and batch.dim():
            if batch.is_complex():
                yield f"entry {name}", torch.view_as_real(batch.detach().resolve_conj())
            elif batch.is_floating_point():
                yield f"entry {name}", batch
    elif isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _entries(value, f"{name}.{key}" if name else repr(key))
    elif isinstance(batch, (list, tuple)):
        for number, value in enumerate(batch):
            yield from _entries(value, f"{name}.{number}" if name else str(number))


def _faults(tensor: Tensor, numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """The samples with nan or inf in their rows of `tensor`, (samples, ...)."""
    if len(tensor) == len(numbers):
        rows = tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach()[:, None]
        for value, wrong in (("nan", rows.isnan()), ("inf", rows == math.inf)):
            yield from ((int(numbers[row]), value) for row in wrong.any(1).nonzero().flatten().tolist())


def named_ranks(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """ "rank 1 on n0, rank 2 on n1". nodes: of every rank of the world."""
    shown = [f"rank {rank} on {nodes[rank]}" for rank in ranks[:SHOWN]]
    return ", ".join([*shown, f"{len(ranks) - SHOWN} more"] if len(ranks) > SHOWN else shown)


def _placed(model: LiveModel, name: str) -> str:
    """The parameter, with the kind of the module that has it where this rank has the module."""
    owner = dict(model.module.named_modules()).get(name.rpartition(".")[0])
    return name if owner is None else f"{name} ({type(owner).__name__})"


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
