"""The logs of a run as a whole: its starts, warnings and events, and the error with which a rank failed, in bounded memory."""

from __future__ import annotations

import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path

from hpctrain.base.errors import escaped
from hpctrain.base.safe_files import LOGS, log_of, reading
from hpctrain.training.log_file import BEGUN, DONE, STOPPED
from hpctrain.training.log_file import KILLED as KILLED  # for readers of failures
from hpctrain_tools.runs.following import parts_of

_LINE = re.compile(rb"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}[+-]\d{4}) ([A-Z]+) (.*)")
# begins the first line of a start, with the number of ranks
_BEGUN = re.compile(r"rank \d+ of (\d{1,9})\b")
_ERROR = re.compile(rf"([A-Z]\w*(?:Error|Exception|Interrupt)|{KILLED}): \S")
HANG = "watchdog"
"""The kind of a failure that the watchdog ended."""
OF_ANOTHER = "CommunicationError"
"""Follows where another rank has failed."""
_WATCHDOG = "the watchdog ends this rank"
# begin rank 0's diagnosis, and the lines of it about ranks that the others wait for
_HANG, _MISSING = "hpctrain: watchdog: ", b"  missing: "
_RANK = re.compile(r"ranks? (\d{1,9})\b")
# begin the lines about something that doesn't happen in each run
_EVENTS = (DONE, STOPPED, "guard  ", "ended  ", "resumed", "saved  ", "weights  ", _WATCHDOG)
# lines of a start, by their first word
_FACTS = ("mesh", "batch", "parameters", "precision", "ranks", "data", "pipeline")
_STARTS, _REMARKS, _LONGEST = 1000, 200, 2000
# logs that are looked at for the errors of ranks; more only until there is one that does not follow from another rank's
_LOGS = 64
# the error of a start may seem to be so much before its begin, as clocks of nodes differ
_EARLIER = timedelta(seconds=1)
_TAIL = 2**18


@dataclass(frozen=True)
class LogLine:
    """A line. time: with its zone."""

    time: datetime
    level: str
    text: str


@dataclass
class LogStart:
    """A start of rank 0. last: the time of its last line. ranks: their number. facts: of the job, by name, such as "mesh"."""

    begun: datetime
    last: datetime
    ranks: int
    facts: dict[str, str] = field(default_factory=dict)


@dataclass
class LogSeen:
    """Rank 0's log. remarks: the newest warnings and events."""

    starts: deque[LogStart] = field(default_factory=lambda: deque(maxlen=_STARTS))
    remarks: deque[LogLine] = field(default_factory=lambda: deque(maxlen=_REMARKS))


@dataclass(frozen=True)
class Failure:
    """The error with which a rank failed. log: which has its traceback. is_shared: whether others failed with the same one."""

    rank: int
    kind: str
    text: str
    time: datetime
    log: Path
    is_shared: bool = False


def read_log(path: Path) -> LogSeen:
    """Read a log piece by piece; what can't be read is left out."""
    seen, last = LogSeen(), None
    with suppress(OSError):
        for line in (line for part in parts_of(path) for line in part.lines):
            match = _LINE.match(line)
            if match is None:
                continue
            begins = match[2] == b"INFO" and match[3].startswith(BEGUN.encode())
            if begins and last is not None and seen.starts:
                seen.starts[-1].last = _time(last) or seen.starts[-1].last
            last = match
            if begins or match[2] != b"INFO" or not match[3].startswith(b"step "):
                _take(seen, match)
    if last is not None and seen.starts:
        seen.starts[-1].last = _time(last) or seen.starts[-1].last
    return seen


def _take(seen: LogSeen, match: re.Match[bytes]) -> None:
    time, level, text = _time(match), match[2].decode(), match[3][:_LONGEST].decode(errors="replace")
    if time is None or level == "PRINT":
        return
    begins = _BEGUN.match(text) if level == "INFO" else None
    if begins is not None:
        seen.starts.append(LogStart(time, time, int(begins[1])))
    elif level != "INFO" or text.startswith(_EVENTS):
        seen.remarks.append(LogLine(time, level, escaped(text)))
    elif seen.starts:
        name, _, rest = text.partition(" ")
        if name in _FACTS:
            seen.starts[-1].facts.setdefault(name, escaped(rest.strip()))


def find_failure(directory: Path) -> Failure | None:
    """The first error with which a rank's newest start failed; of several, rather none that follows from another rank's."""
    starts, found = read_log(log_of(directory, 0)).starts, list[Failure]()
    newest = starts[-1] if starts else None
    for number, path in enumerate(_logs(directory, newest)):
        if number >= _LOGS and any(one.kind != OF_ANOTHER for one in found):
            break
        one = _failure(path)
        if one is not None and (newest is None or newest.begun - one.time <= _EARLIER):
            found.append(one)
    first = min(found, key=lambda one: (one.kind == OF_ANOTHER, one.text.startswith(_WATCHDOG), one.time), default=None)
    return first and replace(first, is_shared=sum(one.text == first.text for one in found) > 1)


def _logs(directory: Path, newest: LogStart | None) -> list[Path]:
    """The logs of the ranks of the newest start: a start on fewer ranks leaves those of others behind."""
    with suppress(OSError):
        paths = sorted((directory / LOGS).glob("rank-[0-9]*.log"))
        return [path for path in paths if newest is None or _rank(path) < newest.ranks]
    return []


def _failure(path: Path) -> Failure | None:
    found, hang, rank = None, "", _rank(path)
    with suppress(OSError):
        for line in _tail(path):
            match = _LINE.match(line)
            if match is None and hang and line.startswith(_MISSING) and rank == _rank(path):
                told = escaped(line[len(_MISSING) :][:_LONGEST].decode(errors="replace"))
                number = _RANK.match(told)
                hang, rank = f"{hang}: {told}", rank if number is None else int(number[1])
            if match is None or match[2] != b"INFO":
                continue
            text = escaped(match[3][:_LONGEST].decode(errors="replace"))
            if _BEGUN.match(text):
                found, hang = None, ""
            error = _ERROR.match(text)
            if error is not None:
                kind, text, rank = error[1], text[len(error[1]) + 2 :], _rank(path)
            elif text.startswith(_HANG):
                hang, rank = text.removeprefix(_HANG), _rank(path)
                continue
            elif text.startswith(_WATCHDOG) and found is None:
                kind, text = HANG, hang or text
            else:
                continue
            time = _time(match)
            found = found if time is None else Failure(rank, kind, text, time, log_of(path.parents[1], rank))
    return found


def _tail(path: Path) -> list[bytes]:
    with reading(path) as fd, open(fd, "rb", closefd=False) as file:
        size = file.seek(0, 2)
        begin = file.seek(max(0, size - _TAIL))
        return file.read(_TAIL).split(b"\n")[begin > 0 : -1]


def _time(match: re.Match[bytes]) -> datetime | None:
    with suppress(ValueError):
        return datetime.strptime(match[1].decode(), "%Y-%m-%d %H:%M:%S,%f%z")
    return None


def _rank(path: Path) -> int:
    number = path.stem.partition("-")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else 0
