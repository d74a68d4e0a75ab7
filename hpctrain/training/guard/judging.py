"""Judges each step before its update: from figures that all ranks have, so that all ranks act alike."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from hpctrain.base.errors import CheckpointError
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.job.tables import GuardTable


@dataclass(frozen=True)
class StepFigures:
    """Figures of a step that all ranks know before its update.

    losses: each rank's part of the loss. overflow: whether the gradients overflowed under a loss scale that can fall, which is
    no failure.
    """

    step: int
    loss: float
    norm: float
    losses: Sequence[float]
    overflow: bool


@dataclass(frozen=True)
class Verdict:
    """The guard's decision about a step. said: a clause about what was found."""

    cause: Literal["non_finite", "loss_spike"]
    action: Literal["stop", "skip", "rollback", "warn"]
    figures: StepFigures
    said: str
    exhausted: bool = False
    """Whether the job stops because too many steps in a row were left out."""


def remedy_for(verdict: Verdict, saved: bool, faulty: bool) -> str:
    """The remedy for a verdict that ends the training. saved: whether there is a checkpoint. faulty: whether a sample has nan."""
    if verdict.exhausted:
        return "[guard] limit reached: too many steps in a row were left out"
    if verdict.action == "rollback" and not saved:
        return "there is no checkpoint yet to go back to; lower [checkpoint] every_steps"
    others = "try a smaller lr, [optimizer] clip_norm or another precision"
    remedy = "mend the samples, or leave them out of the data" if faulty else others
    if verdict.action == "rollback":
        return f"[guard] limit reached: too many rollbacks to one checkpoint; {remedy}"
    key = "non_finite" if verdict.cause == "non_finite" else "loss_spike.action"
    return f'{remedy}; [guard] {key} = "skip" leaves such updates out'


class Guard:
    """The guards of one run. Equal on all ranks; no method communicates."""

    def __init__(self, table: GuardTable) -> None:
        self._table = table
        window = table.loss_spike.window if table.loss_spike else 0
        # losses of the newest steps that updated the model
        self._losses: deque[float] = deque(maxlen=window)
        self._in_row = 0
        self.skipped = 0
        """Steps of this run that a guard left out."""
        self.rollbacks = 0
        """Rollbacks in this process."""
        # the checkpoint of the newest rollback, and how many led there
        self._target: tuple[Path, int] | None = None

    def judge(self, figures: StepFigures) -> Verdict | None:
        """The verdict on a step; None for an ordinary one, and for one that only the loss scaler leaves out."""
        verdict = self._judge(figures)
        if verdict is not None and verdict.action == "skip":
            if self._in_row == self._table.limit:
                return replace(verdict, action="stop", exhausted=True)
            self._in_row += 1
            self.skipped += 1
        elif not figures.overflow and (verdict is None or verdict.action == "warn"):
            self._in_row = 0
            self._losses.append(figures.loss)  # a step that is left out must not raise the median
        return verdict

    def _judge(self, figures: StepFigures) -> Verdict | None:
        loss, spike = figures.loss, self._table.loss_spike
        if figures.overflow:
            return None
        if not (math.isfinite(loss) and math.isfinite(figures.norm)):
            said = f"loss {loss}, gradient norm {figures.norm}, expected finite numbers"
            return Verdict("non_finite", self._table.non_finite, figures, said)
        if spike is None or len(self._losses) < spike.window:
            return None
        middle = median(self._losses)
        if middle <= 0 or loss <= spike.factor * middle:  # a multiple of a negative loss means nothing
            return None
        said = f"loss {loss:.4g} is above {spike.factor:g} x {middle:.4g}, the median of the last {spike.window} steps"
        return Verdict("loss_spike", spike.action, figures, said)

    def counted(self) -> str:
        """How many steps were left out, for the screen."""
        return f"{self._in_row} in a row, at most {self._table.limit}"

    def may_go_back_to(self, checkpoint: Path) -> bool:
        """Count a rollback to this checkpoint; false if there were as many as allowed."""
        before = self._target[1] if self._target is not None and self._target[0] == checkpoint else 0
        if before == self._table.limit:
            return False
        self._target = checkpoint, before + 1  # another checkpoint counts anew: the training has come further
        self.rollbacks += 1
        return True

    def metrics(self, verdict: Verdict | None) -> dict[str, Any]:
        """The guards' keys of a step's row, None without an event."""
        cause = None if verdict is None else verdict.cause
        return {"guard": cause, "skipped_steps": self.skipped or None, "rollbacks": self.rollbacks or None}

    def state(self) -> list[PluginState]:
        """The guards' state in checkpoints, so that a resumed run judges as an uninterrupted one."""
        if not self._table.may_leave_out and self._table.loss_spike is None:
            return []
        return [PluginState("guard", values=self._values, restore=self._restore)]

    def _values(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "in_row": self._in_row, "skipped": self.skipped}

    def _restore(self, values: dict[str, Any]) -> None:
        try:
            losses = [float(loss) for loss in values["losses"]]
            self._in_row, self.skipped = int(values["in_row"]), int(values["skipped"])
        except (LookupError, TypeError, ValueError):
            raise CheckpointError(
                "the checkpoint's values of [guard] can't come from a training; choose another with --resume PATH"
            ) from None
        self._losses = deque(losses, maxlen=self._losses.maxlen)
