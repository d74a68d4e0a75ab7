"""The end of the time that a job has: early enough before it, the loop saves and stops, as after a signal."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from hpctrain.contracts.identity import Identity

# how many times what the newest steps and all saves took at most is left for the last ones
_RESERVE = 1.5
# the newest steps: a first one that was compiled says nothing about the last one
_STEPS = 10
# seconds left for the first save, but at most this share of all time
_UNKNOWN_SAVE, _SHARE = 60.0, 0.1
# seconds left for all else, and the most of them as a share of all time
_SLACK, _SLACK_SHARE = 5.0, 0.05


class Deadline:
    """Rank 0's view of the time that is left. The other ranks are told at the end of a step, and in an evaluation."""

    def __init__(self, given: float | None, begin: float) -> None:
        """given: seconds from `begin` (on time.monotonic()) to the end of the job's time; None: it has all time."""
        self.is_near = False
        """Whether the training stops because of it."""
        self._given, self._end = given or 0.0, None if given is None else begin + given
        self._save = min(_UNKNOWN_SAVE, _SHARE * self._given)
        self._turns: deque[float] = deque(maxlen=_STEPS)
        self._turned: float | None = None
        self._save_begun: float | None = None
        self._has_saved = False

    def turn(self) -> bool:
        """Called in each step; whether it has to be the last one."""
        now = time.monotonic()
        if self._turned is not None:
            self._turns.append(now - self._turned)
        self._turned = now
        return self.leaves_no(max(self._turns, default=0.0))

    def leaves_no(self, seconds: float) -> bool:
        """Whether the time is over for something that takes so long, and a save after it."""
        if self._end is not None:
            slack = min(_SLACK, _SLACK_SHARE * self._given)
            self.is_near = self._end - time.monotonic() < _RESERVE * (seconds + self._save) + slack
        return self.is_near

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context between two steps, such as an evaluation, whose time is none of theirs."""
        begin = time.monotonic()
        yield
        if self._turned is not None:
            self._turned += time.monotonic() - begin

    def save_begins(self) -> None:
        """A save begins."""
        self._save_begun = time.monotonic()

    def saved(self) -> None:
        """The save that has begun, if one has, is complete."""
        if self._save_begun is not None:
            seconds = time.monotonic() - self._save_begun
            self._save = max(self._save, seconds) if self._has_saved else seconds
            self._save_begun, self._has_saved = None, True


def deadline_of(
    time_limit: float | None, begin: float, identity: Identity, environment: Mapping[str, str] = os.environ
) -> Deadline:
    """The earlier one of `[job] time_limit` and the end of the Slurm job. begin: of the run, on time.monotonic()."""
    limits = [] if time_limit is None else [time_limit]
    end = environment.get("SLURM_JOB_END_TIME", "")  # seconds since 1970, from Slurm 22.05 on
    if end.isdigit():
        limits.append(float(end) - time.time() + time.monotonic() - begin)
    return Deadline(min(limits, default=None) if identity.rank == 0 else None, begin)
