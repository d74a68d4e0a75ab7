"""Finds what was not finite first, after a step whose loss or gradient norm is not: healthy steps pay nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.base.errors import reason
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.life_cycle import LiveModel
from hpctrain.contracts.model import tensors_in
from hpctrain.contracts.runner import MicroBatch
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.training.guard.replicas import named_ranks

LOG = logging.getLogger("hpctrain")


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
    """A clause about the first sample of a step, on any rank, that has nan; None if there is none. Collective over all ranks.

    indices: of each micro batch's samples. kind: what the clause calls a sample.
    """
    mine: list[int] = []
    try:
        for micro, numbers in zip(micro_batches, indices, strict=True):
            for tensor in tensors_in(micro.batch):
                if tensor.dim() and len(tensor) == len(numbers):
                    rows = tensor.detach().isnan().flatten(1) if tensor.dim() > 1 else tensor.detach().isnan()[:, None]
                    mine += [int(numbers[row]) for row in rows.any(1).nonzero().flatten().tolist()]
    except Exception as error:  # a batch may hold any kind of tensor, and the step has its own end
        LOG.warning("the samples of the step cannot be looked at: %s", reason(error))
    first = min((one for one in gather_values(min(mine, default=None)) if one is not None), default=None)
    return None if first is None else f"{kind} {first} has nan"


def _placed(model: LiveModel, name: str) -> str:
    """The parameter, with the kind of the module that has it where this rank has the module."""
    owner = dict(model.module.named_modules()).get(name.rpartition(".")[0])
    return name if owner is None else f"{name} ({type(owner).__name__})"


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
