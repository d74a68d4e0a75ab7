"""The figures of a step that ranks exchange: losses, the gradient's norm, memory, times, requests to stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hpctrain.base.errors import shown
from hpctrain.contracts.plugin import broken
from hpctrain.contracts.runner import MicroBatch
from hpctrain.job.parts import Parts
from hpctrain.model.conformance.first_step import FirstStep
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.ranks.signals import STOPPED, StopRequest
from hpctrain.training.guard.judging import StepFigures
from hpctrain.training.metrics import Figure, gather_row
from hpctrain.training.session import Session

T = TypeVar("T")

_ALIKE = 1e-3
"""The relative difference between ranks' norms of one gradient; they are sums of the same numbers."""


@dataclass(frozen=True)
class RankFigures(Generic[T]):
    """Figures that ranks tell each other of a step, as the device has them (Figure) or as numbers."""

    loss: T
    """Sum of the rank's losses that no other rank counts."""

    square: T
    """Sum of the squares of the rank's gradients; of replicas, where ranks hold parts, one rank counts them."""

    out_of_memory: T
    """1 if a forward or backward ran out of memory."""

    terms: T
    """Tokens or samples that the rank's losses are summed over; 0 where another rank counts them."""

    stop: T
    """The level of a request to stop, 0 for none."""

    replica: T
    """Replicas.glance."""

    route: T
    """TrainedModel.route."""

    request: T
    """1 if another terminal has asked something of this rank."""

    of_meters: Sequence[T]
    """Meters.figures."""

    of_runner: Sequence[T]
    """Runner.figures: as many on every rank."""

    named_losses: Sequence[T]
    """NamedLosses.figures: as many on every rank."""

    def exchanged(self, device: torch.device) -> list[RankFigures[float]]:
        """Each rank's figures, equal on all ranks. Collective."""
        names = [one.name for one in fields(self)]
        given: list[Any] = [getattr(self, name) for name in names]
        values = [one for value in given for one in (value if isinstance(value, Sequence) else [value])]
        made: list[RankFigures[float]] = []
        for row in gather_row(values, device):
            left = iter(row)
            found: dict[str, Any] = {
                name: list(islice(left, len(value))) if isinstance(value, Sequence) else next(left)
                for name, value in zip(names, given, strict=True)
            }
            made.append(RankFigures(**found))
        return made


def exchange_figures(
    session: Session,
    micro_batches: Sequence[MicroBatch],
    loss_sum: Tensor,
    gradients: list[Tensor],
    stop: StopRequest,
) -> list[RankFigures[float]]:
    """Tell all ranks this one's loss, norm, memory and requests to stop. Here alone the loop waits for the device."""
    model = session.model
    lacks_memory = model.runner.out_of_memory is not None
    measured = session.meters.figures(micro_batches)
    with session.hooks.position.inside("exchange of figures", session.progress.step):
        return RankFigures[Figure](
            loss=loss_sum * model.loss_share,
            square=model.totals.square(gradients),
            out_of_memory=float(lacks_memory),
            terms=sum(micro.terms for micro in micro_batches) * model.loss_share,
            stop=float(max(stop.level, STOPPED if session.deadline.turn() else 0)),
            replica=0.0 if session.replicas is None else session.replicas.glance(session.progress.step),
            route=model.route(),
            request=float(session.queries is not None and session.queries.has_request),
            of_meters=measured,
            of_runner=model.runner.figures(),
            named_losses=model.named_losses.figures(whole=not lacks_memory),
        ).exchanged(session.device)


def step_figures(
    session: Session, ranks: Sequence[RankFigures[float]], count: int, trial: FirstStep | None
) -> StepFigures:
    """Decide on the loss and the norm that all ranks go by. Raises ContractError for different gradients."""
    session.model.refuse_other_routes([one.route for one in ranks])
    out_of_memory = [rank for rank, one in enumerate(ranks) if one.out_of_memory]
    losses = [one.loss for one in ranks]
    loss = math.nan if out_of_memory else sum(losses) / count
    found = figures_of_all(session, loss, losses, [one.square for one in ranks], out_of_memory)
    if trial is not None and math.isfinite(found.norm) and not session.parts.sharding.ranks_diverge:
        trial.summed(found.norm, session.model.scaler.scale)
    return found


def figures_of_all(
    session: Session, loss: float, losses: Sequence[float], squares: Sequence[float], out_of_memory: Sequence[int] = ()
) -> StepFigures:
    """The figures of an update. losses, squares: each rank's. Raises ContractError for different gradients."""
    norms = session.model.totals.norms(squares)
    norm = next((one for one in norms if not math.isfinite(one)), norms[session.identity.rank])
    if math.isfinite(norm) and not session.parts.sharding.ranks_diverge:
        refuse_different_norms(session.parts, norms, session.model.scaler.scale)
    overflow = not math.isfinite(norm) and session.model.scaler.skips_nonfinite
    return StepFigures(session.progress.step + 1, loss, norm, losses, out_of_memory, overflow)


def refuse_different_norms(parts: Parts, norms: Sequence[float], scale: float) -> None:
    """Raises ContractError on all ranks unless the full gradient has one norm. norms: of each rank. scale: of this rank's loss."""
    if max(norms) - min(norms) <= _ALIKE * max(norms):
        return
    scales = sorted(set(gather_values(scale)))
    if len(scales) > 1:
        raise broken(
            parts.precision, f"scales the loss by {shown(scales)} on the ranks", "one scale on all", everywhere=True
        )
    told = f"left other gradients on each rank, whose norms are {', '.join(f'{one:.4g}' for one in sorted(set(norms))[:4])}"
    shared = [one.name for one in parts.parallelism.values() if one.traits.ranks_have == "the same samples"]
    axes = f"; or the ranks of {' or '.join(shared)} have other samples, which its traits deny" if shared else ""
    raise broken(parts.sharding, told, f"one sum on all ranks{axes}", everywhere=True)
