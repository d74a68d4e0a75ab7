"""Windows on disk, and the events of a trace, read piece by piece: a trace may be larger than memory. Imports no torch."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import IO, Any

from hpctrain.base.safe_files import is_own_directory, read_bytes, reading
from hpctrain.toolkit.commands import UsageError, escaped, reason
from hpctrain_tools.profile.layout import FOLDER, INDEX, TRACE

# characters that are read at a time
_PIECE = 2**20
# characters of one event: more than the longest stack has
_LONGEST = 2**26
_BLANK = re.compile(r"[\s,]*")


@dataclass(frozen=True)
class Traced:
    """A rank in a window."""

    rank: int
    node: str
    place: Mapping[str, Sequence[int]]
    offset_ns: int
    error_ns: int
    trace: Path

    @property
    def label(self) -> str:
        """ "rank 3 (dp 1, tp 1) node n2"."""
        axes = ", ".join(f"{axis} {place[0]}" for axis, place in self.place.items() if place[1] > 1)
        return f"rank {self.rank}" + (f" ({axes})" if axes else "") + f" node {self.node}"


@dataclass(frozen=True)
class StoredWindow:
    """A window in a run's directory."""

    directory: Path
    first: int
    last: int
    size: int
    ranks: Sequence[Traced]
    missing: Mapping[str, str]
    groups: Mapping[str, str]
    """The axis of each group of ranks, by torch's description of the group."""

    def __str__(self) -> str:
        cut = f"steps {self.first} to {self.last}" if self.last > self.first else f"step {self.first}"
        return f"{self.directory}: {cut}, {len(self.ranks)} of {self.size} rank{'s' * (self.size > 1)}"


def stored_window(run: Path, name: str | None) -> StoredWindow:
    """The window `name` of a run, or the newest one. Raises UsageError if there is none, or it can't be read."""
    folder = run / FOLDER
    found = [
        path for path in folder.glob(f"step-*/{INDEX}") if is_own_directory(path.parent) and is_own_directory(folder)
    ]
    known = sorted(found, key=lambda path: (path.lstat().st_mtime_ns, path))
    if name is not None:
        known = [path for path in known if path.parent.name == name]
    if not known:
        names = ", ".join(sorted(path.name for path in folder.glob("step-*"))) or "none"
        raise UsageError(
            f"{folder}: found {names}, expected {name or 'a window of steps'}; [profile] record = 3 in the job records one, and "
            f"`hpctrain profile {run} --now` in a running job"
        )
    try:
        return _window(known[-1].parent, json.loads(read_bytes(known[-1])))
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        raise UsageError(f"{known[-1]}: {reason(error)}; expected the index of a window") from None


def refuse_empty(window: StoredWindow) -> None:
    """Raises UsageError for a window without traces."""
    if not window.ranks:
        why = "; ".join(f"rank {rank}: {one}" for rank, one in list(window.missing.items())[:4]) or "none was recorded"
        raise UsageError(
            f"{window.directory}: found no trace of any rank ({why}); record again: hpctrain profile RUN_DIR --now"
        )


def _window(directory: Path, index: Mapping[str, Any]) -> StoredWindow:
    ranks = []
    for one in index["ranks"]:
        names = [str(name) for name, _ in one["files"] if str(name).endswith(TRACE) and os.sep not in str(name)]
        place = {escaped(str(axis)): (int(at), int(size)) for axis, (at, size) in one["place"].items()}
        ranks.append(
            Traced(
                int(one["rank"]), escaped(str(one["node"])), place, int(one["offset_ns"]), int(one["error_ns"]),
                directory / names[0],
            )
        )  # fmt: skip
    missing = {escaped(str(rank)): escaped(str(why)) for rank, why in index["missing"].items()}
    groups = {str(description): escaped(str(axis)) for description, axis in index["groups"].items()}
    return StoredWindow(directory, int(index["first"]), int(index["last"]), int(index["size"]), ranks, missing, groups)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """A context in which content that torch.profiler does not write becomes a UsageError about `path`."""
    try:
        yield
    except UsageError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise UsageError(f"{path}: {reason(error)}; expected a trace of torch.profiler") from None


class Events:
    """The events of a Chrome trace, one after the other. Iterate once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base_ns = 0
        """The time from which every other one counts; known when the first event comes."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with (
                reading(self.path) as descriptor,
                open(descriptor, "rb", closefd=False) as packed,
                gzip.open(packed, "rt", encoding="utf-8", errors="replace") as file,
            ):
                yield from self._read(_Text(file))
        except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
            raise UsageError(f"{self.path}: {reason(error)}; expected a whole trace of torch.profiler") from None

    def _read(self, text: _Text) -> Iterator[dict[str, Any]]:
        text.expect("{")
        while not text.comes("}"):
            key = text.value()
            text.expect(":")
            if key == "traceEvents":
                text.expect("[")
                while not text.comes("]"):
                    yield _event(text.value())
                text.expect("]")
            else:
                value = text.value()
                if key == "baseTimeNanoseconds":
                    self.base_ns = int(value)


def _event(found: Any) -> dict[str, Any]:
    """The event. Raises ValueError for anything else."""
    if (
        not isinstance(found, dict)
        or not all(isinstance(found.get(key, 0), (int, float)) and isfinite(found.get(key, 0)) for key in ("ts", "dur"))
        or not isinstance(found.get("args", {}), dict)
    ):
        raise ValueError(f"found {found!r:.60} among its events")
    return found


class _Text:
    """A text of JSON values, of which a part is in memory."""

    def __init__(self, file: IO[str]) -> None:
        self._file, self._part, self._at = file, "", 0
        self._decode = json.JSONDecoder(strict=False, parse_constant=lambda _: None).raw_decode

    def comes(self, mark: str) -> bool:
        """Whether `mark` is next, behind blanks and commas."""
        self._skip()
        return self._part.startswith(mark, self._at)

    def expect(self, mark: str) -> None:
        """Go on behind `mark`."""
        if not self.comes(mark):
            raise ValueError(f"found {self._part[self._at : self._at + 20]!r} in place of {mark!r}")
        self._at += len(mark)

    def value(self) -> Any:
        """The next value."""
        self._skip()
        while True:
            try:
                found, end = self._decode(self._part, self._at)
            except ValueError:
                if len(self._part) - self._at > _LONGEST or not self._more():
                    raise
                continue
            if end < len(self._part) or not self._more():  # a number may go on
                self._at = end
                return found

    def _skip(self) -> None:
        while True:
            blank = _BLANK.match(self._part, self._at)
            assert blank is not None  # it matches nothing, too
            self._at = blank.end()
            if self._at < len(self._part) or not self._more():
                return

    def _more(self) -> bool:
        piece = self._file.read(_PIECE)
        self._part, self._at = self._part[self._at :] + piece, 0
        return bool(piece)
