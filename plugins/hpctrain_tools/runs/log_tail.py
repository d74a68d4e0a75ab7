"""The end of rank 0's log: its last lines, and the word with which the newest start ended."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from hpctrain.base.errors import escaped
from hpctrain.base.safe_files import reading
from hpctrain.training.log_file import AS_CANCELLED, BEGUN, DONE, STOPPED

_TAIL = 2**16
_LINE = re.compile(r"\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d+\S* ([A-Z]+) (.*)")
# begins the lines of progress
_OF_A_STEP = re.compile(r"step \d+/\d+  ")
_LONGEST = 1000

LastWord = Literal["begun", "done", "stopped", "cancelled"]


def last_word(log: Path) -> LastWord | None:
    """The way in which the newest start ended; "begun" if it has said nothing of its end, None without a log."""
    for line in reversed(_tail(log)):
        match = _LINE.fullmatch(line)
        if match is None or match[2] != "INFO":
            continue
        if match[3].startswith(DONE):
            return "done"
        if match[3].startswith(STOPPED):
            return "cancelled" if AS_CANCELLED in match[3] else "stopped"
        if match[3].startswith(BEGUN):
            return "begun"
    return "begun" if log.is_file() else None


def last_lines(log: Path, most: int) -> list[str]:
    """The last lines without those of progress, with the time of day in front, oldest first. Control characters are escaped."""
    shown: list[str] = []
    for line in reversed(_tail(log)):
        match = _LINE.fullmatch(line)
        if match is not None and _OF_A_STEP.match(match[3]):
            continue
        text = line if match is None else f"{match[1]} {match[3]}"
        shown.append(escaped(text[:_LONGEST]))
        if len(shown) == most:
            break
    return shown[::-1]


def _tail(log: Path) -> list[str]:
    """The complete lines at the end of the log."""
    with suppress(OSError), reading(log) as fd, open(fd, "rb", closefd=False) as file:
        size = file.seek(0, 2)
        begin = file.seek(max(0, size - _TAIL))
        lines = file.read(_TAIL).decode(errors="replace").split("\n")
        return lines[begin > 0 : -1]
    return []
