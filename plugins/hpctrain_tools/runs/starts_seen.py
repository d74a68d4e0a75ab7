"""The starts of a run, and the steps that it lost, from starts.jsonl. The file may be another person's, and crafted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from hpctrain.base.safe_files import STARTS
from hpctrain_tools.runs.following import parts_of
from hpctrain_tools.runs.rows import count_of, number_of

MOST_SECONDS = 1e10
"""Longer than any run; a crafted file may hold any number."""
# lines; of more, the first and the newest ones
_MOST = 10_000


@dataclass(frozen=True)
class Start:
    """A start. time: in seconds since 1970. offset: of the job's clock from UTC. ranks_of_hosts: as many ranks has each of `hosts`;
    empty if that is not known. device_bytes: the memory of an accelerator; None on a CPU, or if it is not known."""

    time: float
    offset: timedelta
    command: str
    directory: str
    ranks: int
    hosts: tuple[str, ...]
    ranks_of_hosts: tuple[int, ...]
    launcher: str
    versions: Mapping[str, str]
    plugins: tuple[str, ...]
    commit: str
    is_changed: bool
    device: str
    device_bytes: float | None


@dataclass(frozen=True)
class Lost:
    """Steps whose rows were dropped, since they were trained again from `back_to_step`. time: of the resume, or the rollback."""

    time: float
    back_to_step: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class StartsSeen:
    """All starts and losses, in their order."""

    starts: tuple[Start, ...] = ()
    lost: tuple[Lost, ...] = ()


def read_starts(directory: Path) -> StartsSeen:
    """The starts of a run; none if the file can't be read."""
    found: list[Start | Lost] = []
    with suppress(OSError):
        for part in parts_of(directory / STARTS):
            found += [one for line in part.lines if (one := _read(line)) is not None]
            if len(found) > _MOST:
                found = [found[0], *found[1 - _MOST :]]
    starts = tuple(one for one in found if isinstance(one, Start))
    return StartsSeen(starts, tuple(one for one in found if isinstance(one, Lost)))


def _read(line: bytes) -> Start | Lost | None:
    try:
        row = json.loads(line)
        moment = datetime.fromisoformat(row["time"]).astimezone() if isinstance(row, dict) else None
        written = datetime.fromisoformat(row["time"]) if isinstance(row, dict) else None
    except (ValueError, RecursionError, KeyError, TypeError, OverflowError, OSError):
        return None
    if moment is None or written is None:
        return None
    time = moment.timestamp()
    back, steps, seconds = count_of(row.get("back_to_step")), count_of(row.get("lost_steps")), row.get("lost_seconds")
    if back is not None and steps is not None:
        return Lost(time, back, steps, min(max(0.0, number_of(seconds) or 0.0), MOST_SECONDS))
    return _start(row, time, written.utcoffset() or timedelta())


def _start(row: Mapping[str, Any], time: float, offset: timedelta) -> Start:
    git, versions = row.get("git"), row.get("versions")
    commit = git.get("commit") if isinstance(git, dict) else None
    return Start(
        time,
        offset,
        _text(row.get("command")),
        _text(row.get("directory")),
        count_of(row.get("ranks")) or 1,
        tuple(map(_text, _list(row.get("hosts")))),
        tuple(count for one in _list(row.get("ranks_of_hosts")) if (count := count_of(one)) is not None),
        _text(row.get("launcher")),
        {name: _text(value) for name, value in versions.items()} if isinstance(versions, dict) else {},
        tuple(map(_text, _list(row.get("plugins")))),
        _text(commit),
        isinstance(git, dict) and git.get("changed") is True,
        _text(row.get("device")),
        number_of(row.get("device_bytes")),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
