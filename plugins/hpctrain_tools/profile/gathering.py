"""Brings the files of a window from all ranks to rank 0's disk, over the job's group: nodes need no disk in common."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from hpctrain.api import created, gather_values, make_directory, reason, replacing, temporary_name
from hpctrain_tools.profile.layout import INDEX

LOG = logging.getLogger("hpctrain")

# bytes that travel at a time
_PIECE = 8 * 2**20


@dataclass
class Share:
    """A rank's part of a window: notes on it, and the names and sizes of its files. why: a clause if it has none."""

    rank: int
    node: str
    place: Mapping[str, Sequence[int]]
    """The rank's place on each axis of the mesh, and the axis's size."""
    offset_ns: int = 0
    error_ns: int = 0
    """How much later its clock is than rank 0's, and the largest error of that."""
    begin_ns: int = 0
    end_ns: int = 0
    """The recorded time, by its own clock."""
    files: list[Sequence[Any]] = field(default_factory=list)
    why: str = ""

    def give(self, paths: Sequence[Path]) -> None:
        """Give these files."""
        self.files = [(path.name, path.stat().st_size) for path in paths]


def gather(
    mine: Share,
    local: Path,
    window: Path,
    about: Mapping[str, Any],
    busy: Callable[[], None],
    come: Callable[[int], None],
) -> tuple[Path, dict[str, Any]] | None:
    """Copy the files of all ranks, which lie in each one's `local`, into the new directory `window` of rank 0. Collective.

    about: notes on the window. busy: called with every piece. come: called on rank 0 when a rank's files are there. Rank 0 gets the
    directory, which has a number if there was one of this name, and its index: the notes, `ranks` with the shares that have files,
    and `missing`, clauses by rank. The others get None, and so does rank 0 where it can't write.
    """
    shares = [Share(**one) for one in gather_values(asdict(mine))]
    sink = _Sink(window) if mine.rank == 0 else None
    for share in shares:
        for name, size in share.files:
            with ExitStack() as stack:
                file = stack.enter_context(open(local / name, "rb")) if share.rank == mine.rank else None
                if sink is not None:
                    sink.open(name)
                for begin in range(0, size, _PIECE):
                    busy()
                    piece = _piece(share.rank, file, min(_PIECE, size - begin))
                    if sink is not None:
                        sink.write(piece)
        if sink is not None:
            come(share.rank)
    if sink is None:
        return None
    traced = [asdict(share) for share in shares if share.files]
    missing = {str(share.rank): share.why for share in shares if share.why}
    return sink.finish({**about, "ranks": traced, "missing": missing})


def _piece(source: int, file: BinaryIO | None, count: int) -> Any:
    """The next bytes of a file of rank `source`, on all ranks. file: on that rank. A broadcast: every backend has it, and all ranks
    stay at the same piece, so none waits for long."""
    piece = torch.empty(count, dtype=torch.uint8)
    if file is not None:
        content = b""
        with suppress(OSError):  # the others wait for so many bytes; gzip's checksum tells that they are wrong
            content = file.read(count)
        piece = torch.frombuffer(bytearray(content.ljust(count, b"\0")), dtype=torch.uint8)
    if source != 0:  # rank 0 has its own
        dist.broadcast(piece, group_src=source)
    return piece.numpy()


class _Sink:
    """The directory of a window on rank 0, under another name until it is complete. A file that can't be written must not stop the
    other ranks, which send on."""

    def __init__(self, window: Path) -> None:
        self._window, self._directory = window, temporary_name(window)
        self._closing, self._fd = ExitStack(), -1
        self._error: OSError | None = None
        self._do(lambda: make_directory(self._directory))

    def open(self, name: str) -> None:
        """The next file."""
        self._do(self._close)
        self._do(lambda: self._open(self._directory / name))

    def write(self, piece: Any) -> None:
        """The next bytes of the file."""
        self._do(lambda: self._write(memoryview(piece)))

    def finish(self, index: Mapping[str, Any]) -> tuple[Path, dict[str, Any]] | None:
        """Write the index, and give the directory its name. Its files stay readable if the job dies now."""
        self._do(self._close)
        found: list[Path] = []
        self._do(lambda: found.append(self._named(index)))
        if self._error is None:
            return found[0], dict(index)
        LOG.warning("profile: %s could not be written: %s; training goes on", self._window, reason(self._error))
        with suppress(OSError):
            self._closing.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        return None

    def _do(self, work: Callable[[], None]) -> None:
        if self._error is None:
            try:
                work()
            except OSError as error:
                self._error = error

    def _close(self) -> None:
        self._closing.close()

    def _open(self, path: Path) -> None:
        self._fd = self._closing.enter_context(created(path))

    def _write(self, rest: memoryview) -> None:
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def _named(self, index: Mapping[str, Any]) -> Path:
        with replacing(self._directory / INDEX) as file:
            file.write(json.dumps(index, indent=1).encode())
        names = (self._window.with_name(f"{self._window.name}.{number}") for number in itertools.count(2))
        window = next(name for name in (self._window, *itertools.islice(names, 10_000)) if not os.path.lexists(name))
        self._directory.rename(window)
        return window
