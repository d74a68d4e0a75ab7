"""The state of a run by the files in its directory, whoever started it, without asking a scheduler.

An end is read from the log: a file of its own would be one more to keep in step, and a killed process writes none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import reason
from hpctrain_tools.runs.holder import Holder, holder_of
from hpctrain_tools.runs.log_tail import last_word
from hpctrain_tools.runs.rows import Step
from hpctrain_tools.runs.run_directory import JobSeen, RunDirectory

# seconds: a run that has written so recently goes on, where its lock can't tell
_FRESH = 60.0
# A run with long steps has so many of them instead
_STEPS = 5

Word = Literal["pending", "running", "done", "failed", "cancelled", "stopped", "unknown"]


@dataclass(frozen=True)
class Standing:
    """word: "stopped" is a run that has saved and goes on when its command is given again, "failed" one that ended without such a
    word. detail: the rest of the sentence."""

    word: Word
    detail: str = ""
    is_guess: bool = False
    """Whether a scheduler would know better: the run has written just now, and its lock does not tell."""

    def __str__(self) -> str:
        return f"{self.word} ({self.detail})" if self.detail else self.word

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.word not in ("pending", "running", "unknown")


def standing_of(run: RunDirectory, job: JobSeen, newest: Step | None) -> Standing:
    """The state of the run. Looks at the lock, so not for the process that holds it."""
    if not run.is_run() and not run.log.exists():
        return Standing("pending", "no run is here yet; hpctrain runs lists others")
    holder, why = _holder(run.path)
    if holder is not None and holder.holds:
        return Standing("running", holder.name)
    word = last_word(run.log)
    if word is None and job.is_done(newest):
        return Standing("done")
    submitted, wrote = run.submitted(), run.wrote()
    if submitted is not None and (wrote is None or wrote < submitted):
        return Standing("pending", "submitted")
    if word is None:
        return Standing("unknown", why) if why else Standing("stopped")
    if word != "begun":
        return Standing(word)
    sees_all = holder is not None and holder.is_of_this_node
    since = None if wrote is None else time.time() - wrote
    steps = _STEPS * (newest.step_seconds or 0.0) if newest is not None else 0.0
    if not sees_all and since is not None and since < max(_FRESH, steps):
        return Standing("running", f"wrote {max(0.0, since):.0f} s ago", is_guess=True)
    return Standing("unknown", why) if why else Standing("failed")


def _holder(directory: Path) -> tuple[Holder | None, str]:
    """The lock's holder, or why that is not known."""
    try:
        return holder_of(directory), ""
    except OSError as error:
        return None, f"running or stopped: its lock cannot tell: {reason(error)}"


def described(directory: Path) -> str | None:
    """ "running (process 12 on node3), step 17 of 40, loss 1.0926, newest checkpoint runs/NAME/checkpoints/step-00000010"; None for
    a directory without a run."""
    run = RunDirectory(directory)
    if not run.is_run():
        return None
    job, newest = run.job(), run.newest_rows().step
    checkpoint = run.checkpoint()
    words = [
        str(standing_of(run, job, newest)),
        job.progress(newest) or "before its first step",
        *([f"loss {newest.loss:.4f}"] if newest is not None and newest.loss is not None else []),
        f"newest checkpoint {checkpoint}" if checkpoint else "no checkpoint",
    ]
    return ", ".join(words)
