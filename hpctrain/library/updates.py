"""The updates of a program's loop: an optimizer's step as the loop of `hpctrain run` takes it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hpctrain.base.errors import TrainingError
from hpctrain.library.agreement import Agreement
from hpctrain.library.trained import Trained
from hpctrain.training.figures import figures_of_all, records_of_ranks
from hpctrain.training.guard.judging import StepFigures, Verdict
from hpctrain.training.loop import clip, is_taken, update
from hpctrain.training.metrics import Figure

T = TypeVar("T")


@dataclass(frozen=True)
class Update:
    """An optimizer's step, equal on all ranks. lr: of its first group. taken: whether it has changed the model."""

    loss: float
    norm: float
    lr: float
    taken: bool
    verdict: Verdict | None


@dataclass(frozen=True)
class UpdateFigures(Generic[T]):
    """Figures that ranks tell each other of an update; the first three as `RankFigures`.

    share: of this rank's losses in the mean. used: Trained.used_bits.
    """

    loss: T
    share: T
    square: T
    route: T
    used: Sequence[T]


class Updates:
    """The updates of the step that goes on, by the model's name."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._numbers: dict[str, int] = {}
        self._found: dict[str, StepFigures] = {}
        """Figures of gradients that the program has had clipped."""
        self.done: dict[str, Update] = {}
        self.finite = True
        """Whether every gradient of the step was finite so far."""

    def begin_step(self) -> None:
        """A step begins."""
        self.done.clear()
        self._found.clear()
        self.finite = True

    def name(self, trained: Iterable[Trained]) -> None:
        """Number the optimizers, in one order on all ranks."""
        self._numbers = {one.name: self._agreement.name(one.name) for one in trained}

    @contextmanager
    def backwarding(self, trained: Collection[Trained]) -> Iterator[None]:
        """A context for the loop's backward."""
        for one in trained:
            one.backwarding()
        try:
            yield
        finally:
            for one in trained:
                one.backward_runs = False

    def backwarded(self, trained: Iterable[Trained], loss: Tensor) -> None:
        """A backward of `loss` is over. Collective where the last micro batch's gradients are summed."""
        for one in trained:
            if one.backwarded():
                one.losses += loss
                self._found.pop(one.name, None)

    def clip(self, trained: Trained, limit: float) -> float:
        """Clip the gradients; returns their norm before. Collective."""
        gradients = trained.summed_gradients()
        figures = self._figures(trained, gradients)
        clip(gradients, figures.norm, limit)
        self._found[trained.name] = figures
        return figures.norm

    def step(self, trained: Trained) -> None:
        """Judge, clip and update, on all ranks or on none. Collective."""
        session = trained.session
        if session is None:
            raise TrainingError("step: the loop has no step yet; expected it inside of `for step in loop.steps()`")
        model, progress = trained.model, session.progress
        gradients = trained.summed_gradients()
        model.sharded.adopt()
        clipped = trained.name in self._found
        figures = self._found.pop(trained.name) if clipped else self._figures(trained, gradients)
        verdict = session.guard.judge(figures)
        follows = trained.follows_schedule
        lr = model.set_learning_rate(*session.schedule_place) if follows else _rate(model.optimizer)
        taken = is_taken(figures, verdict)
        with session.hooks.phase("optimizer", progress.step):
            if taken:
                trained.leave_idle()
                update(session, gradients, 0.0 if clipped else figures.norm, None)
            else:
                model.sums.leave_out()
        trained.updated()
        self.finite = self.finite and math.isfinite(figures.norm)
        before = self.done.get(trained.name)
        if before is not None:  # the step's verdict is the strictest one
            verdict = max(before.verdict, verdict, key=_strictness)
            taken = taken and before.taken
        self.done[trained.name] = Update(figures.loss, figures.norm, lr, taken, verdict)

    def _figures(self, trained: Trained, gradients: list[Tensor]) -> StepFigures:
        """Tell all ranks this one's loss and norm."""
        session, model = trained.session, trained.model
        assert session is not None
        mine: UpdateFigures[Figure] = UpdateFigures(
            loss=trained.losses * model.loss_share,
            share=model.loss_share,
            square=model.totals.square(gradients),
            route=model.route(),
            used=trained.used_bits(),
        )
        ranks: list[Any] = records_of_ranks(
            mine, partial(self._agreement.on, self._numbers[trained.name], session.progress.step)
        )
        trained.note_used([one.used for one in ranks])
        losses = [one.loss for one in ranks]
        model.refuse_other_routes([one.route for one in ranks])
        loss = sum(losses) / sum(one.share for one in ranks)
        return figures_of_all(session, loss, losses, [one.square for one in ranks])


def _strictness(verdict: Verdict | None) -> int:
    return -1 if verdict is None else ("warn", "skip", "rollback", "stop").index(verdict.action)


def _rate(optimizer: torch.optim.Optimizer) -> float:
    return float(optimizer.param_groups[0]["lr"])
