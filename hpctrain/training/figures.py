"""The figures that ranks exchange of a step: losses, the gradient's norm, memory, times, requests to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

from hpctrain.base.errors import shown
from hpctrain.contracts.compression import LossyCompression
from hpctrain.contracts.plugin import broken
from hpctrain.job.parts import Parts
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.training.guard.judging import StepFigures
from hpctrain.training.meters.meters import MeterFigures
from hpctrain.training.session import Session
from hpctrain.training.trained_model import TrainedModel

T = TypeVar("T")
_LEFT_OUT: Any = 0.0
_NONE: Any = ()
_UNMEASURED = MeterFigures()

# the relative difference between ranks' norms of one gradient; they are sums of the same numbers
_ALIKE = 1e-3


@dataclass(frozen=True)
class RankFigures(Generic[T]):
    """Figures that ranks tell each other of a step, as the device has them (Figure) or as numbers.

    A step of `hpctrain run` has one exchange. A program's loop has one before each update and one at the end of the step: each
    leaves out what belongs into the other. Sequences are as long on every rank.
    """

    loss: T = _LEFT_OUT
    """Sum of the rank's losses that no other rank counts."""

    square: T = _LEFT_OUT
    """Sum of the squares of the rank's gradients; of replicas, where ranks hold parts, one rank counts them."""

    route: T = _LEFT_OUT
    """TrainedModel.route."""

    terms: T = _LEFT_OUT
    """Tokens or samples that the rank's losses are summed over, 1 for a program's mean; 0 where another rank counts them."""

    stop: T = _LEFT_OUT
    """The level of a request to stop, 0 for none."""

    request: T = _LEFT_OUT
    """1 if another terminal has asked something of this rank."""

    saves: T = _LEFT_OUT
    """1 if the program has asked for a checkpoint."""

    replicas: Sequence[T] = _NONE
    """Replicas.glance of each model."""

    of_meters: MeterFigures = _UNMEASURED
    """Meters.figures."""

    of_runner: Sequence[T] = _NONE
    """Runner.figures."""

    named: Sequence[T] = _NONE
    """NamedLosses.figures, or the numbers that a program has logged."""

    used: Sequence[T] = _NONE
    """Trained.used_bits."""

    def exchanged(self, gather: Callable[[list[T]], Sequence[Sequence[float]]]) -> list[RankFigures[float]]:
        """Each rank's figures, equal on all ranks. gather: tells all ranks this one's numbers. Collective."""
        return [_read(self, iter(row)) for row in gather(_numbers(self))]


def _numbers(figures: Any) -> list[Any]:
    """The numbers of a dataclass, in the order of its fields."""
    found: list[Any] = []
    for value in vars(figures).values():
        found += (
            value
            if isinstance(value, list | tuple)
            else _numbers(value)
            if isinstance(value, MeterFigures)
            else [value]
        )
    return found


def _read(like: Any, numbers: Iterator[float]) -> Any:
    """The same dataclass of other numbers."""
    values: list[Any] = []
    for value in vars(like).values():
        if isinstance(value, list | tuple):
            values.append(list(islice(numbers, len(value))))
        else:
            values.append(_read(value, numbers) if isinstance(value, MeterFigures) else next(numbers))
    return type(like)(*values)


def figures_of_update(
    session: Session, model: TrainedModel, ranks: Sequence[RankFigures[float]], divisor: float
) -> StepFigures:
    """The loss and the norm that all ranks go by. divisor: of the sum of all losses. Raises ContractError for different gradients,
    TrainingError where ranks ran other blocks."""
    model.refuse_other_routes([one.route for one in ranks])
    losses = [one.loss for one in ranks]
    norms = model.totals.norms([one.square for one in ranks])
    norm = next((one for one in norms if not math.isfinite(one)), norms[session.identity.rank])
    if math.isfinite(norm) and not model.parts.sharding.ranks_diverge:
        refuse_different_norms(model.parts, norms, model.scaler.scale)
    overflow = not math.isfinite(norm) and model.scaler.skips_nonfinite
    return StepFigures(session.progress.step + 1, sum(losses) / divisor, norm, losses, overflow)


def refuse_different_norms(parts: Parts, norms: Sequence[float], scale: float) -> None:
    """Raises ContractError on all ranks unless the full gradient has one norm. norms: of each rank. scale: of this rank's loss."""
    if max(norms) - min(norms) <= _ALIKE * max(norms):
        return
    scales = sorted(set(gather_values(scale)))
    if len(scales) > 1:
        raise broken(parts.precision, f"scales the loss by {shown(scales)} on the ranks", "one scale on all")
    told = f"left other gradients on each rank, whose norms are {', '.join(f'{one:.4g}' for one in sorted(set(norms))[:4])}"
    if isinstance(parts.compression, LossyCompression):
        raise broken(parts.compression, told, "one sum, with the same bits on all ranks")
    shared = [one.name for one in parts.parallelism.values() if one.traits.ranks_have == "the same samples"]
    axes = f"; or the ranks of {' or '.join(shared)} have other samples, which its traits deny" if shared else ""
    raise broken(parts.sharding, told, f"one sum on all ranks{axes}")
