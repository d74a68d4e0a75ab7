"""Follows a file of lines that another process writes, also on another node: only what is new is read.

The file may grow in the middle of a line, and may be replaced by a shorter one under the same name: a resume drops rows.
It is opened anew for each look, since over NFS only that shows what other nodes have written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.safe_files import reading

PART_BYTES = 2 * 2**20
"""Read at once, at most; also the longest line."""
# bytes before the place where reading goes on. They tell another file that got the number of the old one.
_COMPARED = 64


# parts in a row without a line, after which a file is no file of lines: it may be endless
_EMPTY_PARTS = 8


@dataclass(frozen=True)
class Part:
    """Lines that a look has found, complete and without their ends."""

    lines: tuple[bytes, ...]
    anew: bool = False
    """Whether the file is another one: these are its first lines, and those of earlier looks don't count."""
    left: int = 0
    """Bytes that a next look finds already."""


@dataclass(frozen=True)
class _Place:
    """The place in a file where reading goes on. before: the bytes before it. number: the file system's, of the file."""

    at: int = 0
    before: bytes = b""
    number: tuple[int, int] | None = None
    within_line: bool = False
    """Whether the place is within a line that is left out."""


class Follower:
    """Reads a file's lines, each once. Leaves out a line that is longer than a part, with its end."""

    def __init__(self, path: Path, part_bytes: int = PART_BYTES) -> None:
        self._path, self._most = path, part_bytes
        self._place = _Place()

    def look(self) -> Part:
        """Lines that came since the last look, a part at most. A missing file is empty. Raises OSError if it can't be read."""
        with suppress(FileNotFoundError, NotADirectoryError), reading(self._path) as fd:
            return self._read(fd)
        return Part((), self._begin_anew())

    def _read(self, fd: int) -> Part:
        found, anew = os.fstat(fd), False
        number = (found.st_dev, found.st_ino)
        if number != self._place.number:
            anew = self._begin_anew()
        content = self._behind(fd)
        if content is None:
            anew = self._begin_anew()
            content = self._behind(fd) or b""
        whole, full = content.rfind(b"\n") + 1, len(content) >= self._most
        lines = content[:whole].split(b"\n")[self._place.within_line : -1]
        taken = whole or (len(content) if full else 0)
        before = (self._place.before + content[:taken])[-_COMPARED:]
        within_line = not before.endswith(b"\n") if taken else self._place.within_line
        self._place = _Place(self._place.at + taken, before, number, within_line)
        return Part(tuple(lines), anew, max(0, found.st_size - self._place.at) if full else 0)

    def _behind(self, fd: int) -> bytes | None:
        """The part behind the place; None if the bytes before it are not those of earlier, or gone."""
        before = self._place.before
        content = os.pread(fd, len(before) + self._most, self._place.at - len(before))
        return content[len(before) :] if content.startswith(before) else None

    def _begin_anew(self) -> bool:
        """Go back to the first line. Returns whether anything was read before."""
        began = self._place.at > 0
        self._place = _Place()
        return began


def parts_of(path: Path) -> Iterator[Part]:
    """The parts that a file has now, until its end or until nothing in it looks like lines. Raises OSError if it can't be read."""
    follower, empty = Follower(path), 0
    while empty < _EMPTY_PARTS:
        part = follower.look()
        yield part
        empty = 0 if part.lines else empty + 1
        if not part.left:
            return
