"""The hook of a measured job: hpctrain and other trainers take turns on the same samples, in the same processes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hpctrain.api import (
    Batch,
    Control,
    Hook,
    Identity,
    Job,
    LiveModel,
    Membership,
    UsageError,
    gather_values,
    hookimpl,
)
from hpctrain.checking.check import check
from hpctrain.job.parts import Parts
from hpctrain.job.raw import RawJob
from hpctrain_tools.bench.tables import HOOK
from hpctrain_tools.bench.task import Step, Task
from hpctrain_tools.bench.trainers import Trainer

COMPARED = 3
"""Steps at the begin of which losses are compared. They are part of the first turn, which is not measured."""
WARM_UP = 2
"""Steps at the begin of each turn that are not measured: the others have left their caches and threads behind."""
# the relative difference of losses that sums in another order make, in float32 and with products in 16 bits
_TOLERANCE, _ROUNDED = 1e-3, 2e-2
# characters of another library's error
_LONGEST = 300
# measured steps of a turn, at most; turns, at least, where there are so many steps
_TURN, _TURNS = 5, 3


@dataclass
class Turn:
    """The turns of a trainer: seconds of the slowest rank by turn, and the losses of the compared steps."""

    name: str
    seconds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @property
    def measured(self) -> list[float]:
        """The seconds of all measured steps."""
        return [one for turn in self.seconds for one in turn]

    def ratios(self, other: Turn) -> list[float]:
        """The ratio to the other's seconds in each pair of turns."""
        return [
            statistics.median(mine) / statistics.median(its)
            for mine, its in zip(self.seconds, other.seconds, strict=True)
        ]

    def difference(self, other: Turn, steps: int) -> float:
        """The largest relative difference between the losses of the first `steps` steps; infinite where one is not finite."""
        pairs = list(zip(self.losses[:steps], other.losses[:steps], strict=True))
        found = [abs(one - its) / max(abs(its), 1e-12) for one, its in pairs]
        return max((one if math.isfinite(one) else math.inf for one in found), default=math.inf)


Choose = Callable[[Task], Sequence[type[Trainer]]]
"""Gives the other trainers of a job."""


class Turns:
    """Measures at least `steps` steps of the run that it takes part in. Ends the run, which saves nothing."""

    def __init__(self, raw: RawJob, ranks: int | None, steps: int, choose: Choose) -> None:
        """raw: the job, whose parts the trainers are made of; ranks: how many there should be, None for any."""
        self._raw, self._ranks, self._choose = raw, ranks, choose
        self._per_turn = max(1, min(_TURN, steps // _TURNS))
        self._turns = math.ceil(steps / self._per_turn)
        self.hpctrain, self._others = Turn("hpctrain"), dict[str, Turn]()
        self.failed: dict[str, str] = {}
        """Why a trainer has no turns."""
        self.rows: list[Mapping[str, Any]] = []
        """The rows of the measured steps."""
        self.job, self.rank, self.ranks = "", 0, 0
        self.hindrance, self.tolerance = "", 0.0
        self.directory: Path | None = None
        """The run's files on all nodes."""
        self._trainers: list[Trainer] = []
        self._done, self._turn = list[Step](), 0
        self._batches, self._draws, self._seconds = list[Batch](), list[list[Tensor]](), list[float]()

    @property
    def others(self) -> list[Turn]:
        """The turns of the other trainers."""
        return list(self._others.values())

    @property
    def steps(self) -> int:
        """All steps of the run."""
        return COMPARED + self._turns * (WARM_UP + self._per_turn)

    @property
    def done(self) -> bool:
        """Whether all turns have been taken."""
        return self._turn > self._turns

    @hookimpl
    def hpctrain_job_start(self, job: Job, identity: Identity, model: LiveModel, membership: Membership) -> None:
        if self._ranks is not None and self._ranks != identity.size:
            raise UsageError(
                f"-n {self._ranks}: the launcher started {identity.size} ranks; expected the same number, or no -n"
            )
        self.directory = job.output_dir
        self._busy, self.job, self.rank, self.ranks = membership.busy, job.job.name, identity.rank, identity.size
        parts: Parts = check(self._raw, identity.size).parts
        self._task = Task(job, parts, model, identity.size)
        self.hindrance = self._task.hindrance()
        self.tolerance = _TOLERANCE if parts.precision.product_dtype(model.device).itemsize > 2 else _ROUNDED
        self._trainers = [made for kind in self._choose(self._task) if (made := self._made(kind)) is not None]
        self._watch = model.module.register_forward_pre_hook(lambda *_: self._draws.append(self._task.draws()))
        self._begin = time.perf_counter()

    @hookimpl
    def hpctrain_outputs(self, batch: Batch) -> None:
        self._batches.append(batch)

    @hookimpl
    def hpctrain_step_end(self, step: int, metrics: dict[str, Any], model: LiveModel, control: Control) -> None:
        self._seconds.append(time.perf_counter() - self._begin)
        rates = [float(group["lr"]) for group in model.optimizer.param_groups]
        self._done.append(Step(self._batches, 0, 0, rates, self._draws))
        self._batches, self._draws = [], []
        if step <= COMPARED:
            self.hpctrain.losses.append(float(metrics["loss"]))
        elif len(self._done) > WARM_UP:
            self.rows.append(metrics)
        if step == COMPARED:
            self._watch.remove()
        if len(self._done) == (COMPARED if self._turn == 0 else WARM_UP + self._per_turn):
            self._others_turn()
            if self.done:
                control.stop("the measurement is done", save=False)
        self._begin = time.perf_counter()

    def _others_turn(self) -> None:
        """Let the other trainers train the steps that hpctrain has trained since its turn began."""
        self._task.wait()
        self._keep(self.hpctrain, self._seconds)
        steps = [self._counted(one) for one in self._done] if self._trainers else []
        for trainer in self._trainers if self._turn else list(self._trainers):
            self._busy(f"measuring {trainer.name}")
            dist.barrier()
            if self._turn:
                self._keep(self._others[trainer.name], self._timed(trainer, steps)[0])
            else:
                self._try(trainer, steps)
        self._turn += 1
        self._done, self._seconds = [], []
        dist.barrier()

    def _timed(self, trainer: Trainer, steps: Sequence[Step]) -> tuple[list[float], list[Tensor]]:
        """The seconds of each step on this rank, and its sums of losses."""
        seconds, losses = [], []
        for step in steps:
            begin = time.perf_counter()
            losses.append(trainer.step(step))
            self._task.wait()
            seconds.append(time.perf_counter() - begin)
        return seconds, losses

    def _made(self, kind: type[Trainer]) -> Trainer | None:
        """The trainer; None, and the reason in `failed`, if it can't train the job on some rank. Collective."""
        self._busy(f"building {kind.name}")
        made, error = None, ""
        try:
            made = kind(self._task)
        except Exception as failure:  # a third party's code
            error = _told("it can't train this job", failure)
        return None if self._fails(kind.name, gather_values(error)) else made

    def _fails(self, name: str, errors: Sequence[str]) -> bool:
        """Note the first of the ranks' errors, if there is one."""
        first = next((one for one in errors if one), "")
        if first:
            self.failed[name] = first
        return bool(first)

    def _try(self, trainer: Trainer, steps: Sequence[Step]) -> None:
        """The first turn of a trainer, which is left out if it fails. Collective."""
        losses, error = list[float](), ""
        try:
            losses = [float(one) for one in self._timed(trainer, steps)[1]]
        except Exception as failure:  # a third party's code
            error = _told("it failed in its first steps", failure)
        everyone: list[tuple[list[float], str]] = gather_values((losses, error))
        if self._fails(trainer.name, [why for _, why in everyone]):
            self._trainers.remove(trainer)
            return
        sums = [sum(of_step) for of_step in zip(*(found for found, _ in everyone), strict=True)]
        means = [one / step.count for one, step in zip(sums, steps, strict=True)]
        self._others[trainer.name] = Turn(trainer.name, losses=means)

    def _keep(self, turn: Turn, seconds: Sequence[float]) -> None:
        """Keep the measured steps of a turn, each as the slowest rank has it. The first turn is not measured."""
        if self._turn > 0:
            turn.seconds.append([max(ranks) for ranks in zip(*gather_values(list(seconds)), strict=True)][WARM_UP:])

    def _counted(self, step: Step) -> Step:
        """The step with the terms of its loss, which plain loops take from the sizes of their batches."""
        mine = sum(int(self._task.parts.model.count(batch)) for batch in step.batches)
        return Step(step.batches, sum(gather_values(mine)), mine, step.rates, step.draws)


def _told(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"


class TurnsHook(Hook):
    """Gives a run the turns that the command has put here."""

    name = HOOK
    turns: Turns | None = None

    def start(self) -> Turns:
        if TurnsHook.turns is None:
            raise UsageError(f"[[hook]] {HOOK} is set by hpctrain bench only; leave it out")
        return TurnsHook.turns


def hpctrain_hook() -> list[type[Hook]]:
    """The hook, for `[plugins] load` of a measured job alone: no entry point offers it to others."""
    return [TurnsHook]


hookimpl(hpctrain_hook)
