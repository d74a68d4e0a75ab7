"""The channel between `hpctrain run --hostfile` and ranks on other hosts: the standard streams of mpiexec.

A directory, as in channel_directory.py, is not on all hosts. But mpiexec passes its standard input on to rank 0, and the ranks'
standard error back. Signals are numbers, a line each, on the first way. On the second, between two control characters, ranks
tell that they have started or can answer signals, and the job's exit code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from hpctrain.ranks.rank_channel import ERRORS_ON_TERMINAL, ON_TERMINAL, WORD, on_terminal

_SAID = re.compile(rb"\x1ehpctrain (started|ready|exit) (\d{1,9})\x1f")
# more bytes after the first control character are no message
_LONGEST = 40
# bytes at the beginning of a line that may name a node: patterns take the square of a line's length
_MOST = 1000
_FAILED = (
    re.compile(rb"PID \d+ RUNNING AT (\S+)"),  # MPICH, on standard output
    re.compile(rb"with PID \d+ on node (\S+)"),  # Open MPI
    re.compile(rb"ssh: (?:connect to host|Could not resolve hostname) ([\w.-]+)"),
    re.compile(rb"([\w.-]+): Permission denied"),  # ssh
    re.compile(rb"Remote host: +(\S+)"),  # Open MPI: out of reach
    re.compile(rb"missing: ranks? [\d, -]+ on (\S+) (?:is|are|has) "),  # the watchdog
    re.compile(rb"hpctrain: rank \d+ on (\S+) failed"),
    re.compile(rb", on rank \d+ on (\S+)"),  # an error in a user's or a plugin's code
)


def word() -> str:
    """The word that the ranks get as `--started-by`."""
    return WORD + ON_TERMINAL * on_terminal(sys.stdout) + ERRORS_ON_TERMINAL * on_terminal(sys.stderr)


@dataclass
class Heard:
    """The messages of ranks and mpiexec. started: the ranks that have started. ready: those that can answer signals. code: the
    job's exit code, from the first rank that told one. failed: the nodes that failed, the first one first, by the names that
    the launcher or a rank gave them.
    """

    started: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    code: int | None = None
    failed: list[str] = field(default_factory=list)


class Listener:
    """Takes the messages to the starter out of one of the streams."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard
        self._held = self._line = b""

    def take(self, chunk: bytes) -> bytes:
        """Return what can be passed on. Anything from an unfinished message on is held."""
        text = _SAID.sub(self._hear, self._held + chunk)
        begin = text.rfind(b"\x1e")
        complete = text if begin < 0 or len(text) - begin > _LONGEST else text[:begin]
        self._held = text[len(complete) :]
        self._look(complete)
        return complete

    def rest(self) -> bytes:
        """Return what is held at the end."""
        return self._held

    def _hear(self, found: re.Match[bytes]) -> bytes:
        what, number = found[1], int(found[2])
        if what == b"exit":
            self._heard.code = number if self._heard.code is None else self._heard.code
        else:
            (self._heard.started if what == b"started" else self._heard.ready).add(number)
        return b""

    def _look(self, text: bytes) -> None:
        *lines, rest = text.split(b"\n")
        if lines:
            lines[0], self._line = self._line + lines[0], b""
        self._line += rest[: _MOST - len(self._line)]
        for line in lines:
            found = next((one for pattern in _FAILED if (one := pattern.search(line, 0, _MOST))), None)
            if found is not None:
                self._heard.failed.append(found[1].decode("utf-8", "replace").rstrip(",.:;"))


def signals(numbers: Sequence[int]) -> bytes:
    """The bytes to write for rank 0."""
    return "".join(f"{number}\n" for number in numbers).encode()
