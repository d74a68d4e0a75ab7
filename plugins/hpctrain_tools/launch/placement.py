"""Decides on which hosts a job's ranks start: again before each start, since the hostfile may have changed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from hpctrain.base.errors import TrainingError, UsageError
from hpctrain_tools.launch.hosts import Hosts, read_hostfile


class Placement:
    """The places of a job's ranks, from start to start."""

    def __init__(self, hostfile: Path | None, ranks: int | None) -> None:
        """ranks: as asked for; None for all slots of the hostfile, or one without it. Raises UsageError."""
        self._file = hostfile
        self._hosts = Hosts(()) if hostfile is None else read_hostfile(hostfile)
        self._ranks = ranks or (1 if hostfile is None else self._hosts.slots)
        self._failures = Counter[str]()
        self._has_started = False

    def next(self) -> tuple[Hosts | None, int]:
        """The hosts of the next start, with as many slots as ranks, and the ranks. Raises UsageError, TrainingError."""
        if self._file is None:
            return None, self._ranks
        try:
            self._hosts = read_hostfile(self._file)
        except UsageError as error:
            _say(f"{error}; the hosts stay as they were")
        slots = self._hosts.slots
        if slots < self._ranks:
            later = "; the same command continues once there are enough" if self._has_started else ""
            raise (TrainingError if self._has_started else UsageError)(
                f"--hostfile {self._file}: found {slots} slot{'s' if slots > 1 else ''} for {self._ranks} ranks; expected at most "
                f"as many ranks as slots{later}"
            )
        self._has_started = True
        return self._hosts.first(self._ranks), self._ranks

    def note_failure(self, host: str) -> None:
        """A rank on `host` was the first to fail. Says so if it happened before."""
        self._failures[host] += 1
        if self._failures[host] > 1:
            _say(f"ranks on {host} failed first in {self._failures[host]} starts")


def _say(sentence: str) -> None:
    print(f"hpctrain: {sentence}", file=sys.stderr, flush=True)
