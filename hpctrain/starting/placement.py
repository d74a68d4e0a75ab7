"""Decides on how many ranks a job starts, and on which hosts: again before each start, since the hostfile may have changed."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.child_python import python_code
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.starting.hosts import Hosts, read_hostfile

__all__ = ["Counts", "ask_counts"]

_SECONDS = 300.0
_PROGRAM = "from hpctrain.checking.counts import main; main()"
_LOOK_SECONDS = 3.0
"""How often the hostfile is read while fewer ranks run than asked for."""
_FAILURES = 2
"""A host on which ranks failed first this often is left out, in an elastic job."""


@dataclass(frozen=True)
class Counts:
    """fits: the numbers that fit, the largest first. why: why others don't."""

    fits: Sequence[int]
    why: Mapping[int, str]

    def best(self, most: int) -> int | None:
        """The largest number that fits, of those up to `most`."""
        return next((number for number in self.fits if number <= most), None)


def ask_counts(job: Path, overrides: Sequence[str], least: int, most: int) -> Counts:
    """The numbers from `least` to `most` that fit the job. Raises TrainingError if the job cannot be checked."""
    words = python_code(_PROGRAM, str(job), str(least), str(most), *overrides)
    try:
        # a session of its own: Ctrl-C must reach the starter only
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, start_new_session=True
        )
        answer = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        why = (
            done.stderr.strip().splitlines()[-1:] if not isinstance(error, subprocess.TimeoutExpired) else [str(error)]
        )
        raise TrainingError(
            f"the job could not be checked for fewer than {most + 1} ranks: {' '.join(why)}; `hpctrain check {job}` tells more"
        ) from None
    if "error" in answer:
        raise TrainingError(f"the job could not be checked for fewer than {most + 1} ranks: {answer['error']}")
    return Counts(answer["fits"], {int(number): why for number, why in answer["why"].items()})


class Placement:
    """The places of a job's ranks, from start to start."""

    def __init__(
        self, hostfile: Path | None, ranks: int | None, least: int | None, ask: Callable[[int, int], Counts]
    ) -> None:
        """ranks: as asked for; None for all slots of the hostfile, or one without it. least: [elastic] min_ranks, if any.

        ask: which numbers of ranks from one to another fit the job. Raises UsageError.
        """
        self._file, self._least, self._ask = hostfile, least, ask
        self._hosts = Hosts(()) if hostfile is None else read_hostfile(hostfile)
        self._ranks = ranks or (1 if hostfile is None else self._hosts.slots)
        self._current, self._lines = 0, self._hosts.lines
        self._counts: Counts | None = None
        self._failures: dict[tuple[str, str], int] = {}
        self._left_out: list[str] = []
        self._next_look = 0.0

    def next(self) -> tuple[Hosts | None, int]:
        """The hosts of the next start, with as many slots as ranks, and the ranks. Raises UsageError, TrainingError."""
        if self._file is None:
            return None, self._ranks
        self._read(tells=True)
        hosts, count = self._choose()
        self._tell_left_out(hosts)
        if count is None:
            error = TrainingError if self._current else UsageError
            raise error(self._why_none())
        if count < self._ranks:
            self._tell_fewer(hosts, count)
        self._current, self._lines = count, hosts.lines
        self._next_look = time.monotonic() + _LOOK_SECONDS
        return hosts.first(count), count

    def has_more(self) -> bool:
        """Whether more ranks could run than those of the last start. Reads the hostfile every few seconds."""
        if self._file is None or self._current == self._ranks or time.monotonic() < self._next_look:
            return False
        self._next_look = time.monotonic() + _LOOK_SECONDS
        self._read(tells=False)
        count = self._choose()[1]
        if count is None or count <= self._current:
            return False
        _say(f"{self._file} has slots for {count} ranks: those that run save, and {count} start")
        return True

    def note_failure(self, host: str) -> None:
        """A rank on `host` was the first to fail. Says so if it happened before."""
        known = host, self._lines[host]
        self._failures[known] = self._failures.get(known, 0) + 1
        if self._failures[known] > 1:
            _say(f"ranks on {host} failed first in {self._failures[known]} starts")

    def _read(self, tells: bool) -> None:
        """Read the hosts; the last known ones stay if the file cannot be read. A line that has changed begins anew."""
        assert self._file is not None
        try:
            self._hosts = read_hostfile(self._file)
        except UsageError as error:
            if tells:
                _say(f"{error}; the hosts stay as they were")
        present = set(self._hosts.lines.items())
        self._failures = {known: times for known, times in self._failures.items() if known in present}

    def _choose(self) -> tuple[Hosts, int | None]:
        """The hosts, without those that failed if the others are enough; and how many ranks they can take."""
        if self._least is not None:
            bad = [host for (host, _), times in self._failures.items() if times >= _FAILURES]
            good = Hosts(tuple(one for one in self._hosts.named if one[0] not in bad), self._hosts.lines)
            count = self._count(good)
            if count is not None:
                return good, count
        return self._hosts, self._count(self._hosts)

    def _count(self, hosts: Hosts) -> int | None:
        """The most ranks up to those asked for that the hosts have slots for, and the job fits."""
        if hosts.slots >= self._ranks:
            return self._ranks
        if self._least is None or hosts.slots < self._least:
            return None
        if self._counts is None:
            self._counts = self._ask(self._least, self._ranks - 1)
        return self._counts.best(hosts.slots)

    def _why_none(self) -> str:
        slots = self._hosts.slots
        if self._least is None:
            expected = "expected at most as many ranks as slots"
        elif slots < self._least:
            expected = f"expected at least {_slots(self._least)}, [elastic] min_ranks"
        else:
            expected = (
                f"and from [elastic] min_ranks = {self._least} up no number of ranks fits the job{self._misfit(slots)}"
            )
        later = "; the same command continues once there are enough" if self._current else ""
        return f"--hostfile {self._file}: found {_slots(slots)} for {self._ranks} ranks; {expected}{later}"

    def _tell_fewer(self, hosts: Hosts, count: int) -> None:
        why = f"{self._file} has {_slots(hosts.slots)}"
        why += f" without {', '.join(self._left_out)}" if self._left_out else ""
        _say(f"{count} of {self._ranks} ranks start: {why}{self._misfit(hosts.slots) if count < hosts.slots else ''}")

    def _misfit(self, ranks: int) -> str:
        return f"; {ranks} ranks do not fit: {self._counts.why[ranks]}" if self._counts is not None else ""

    def _tell_left_out(self, hosts: Hosts) -> None:
        kept = {name for name, _ in hosts.named}
        left_out = [name for name, _ in self._hosts.named if name not in kept]
        if left_out and left_out != self._left_out:
            for name in left_out:
                _say(f"{name} is left out until its line in {self._file} changes")
        self._left_out = left_out


def _slots(number: int) -> str:
    return f"{number} slot{'s' if number > 1 else ''}"


def _say(sentence: str) -> None:
    print(f"hpctrain: {sentence}", file=sys.stderr, flush=True)
