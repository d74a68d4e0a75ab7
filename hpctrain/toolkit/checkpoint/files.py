"""Files of a checkpoint: opened without following links, read and written at positions, synced."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import torch
from torch import Tensor

from hpctrain import api
from hpctrain.api import TABLE_BYTES, CheckpointError, read_all


@contextmanager
def opened(path: Path, size: int | None = None) -> Iterator[int]:
    """The descriptor of a regular file, never one that a link leads to, of `size` bytes if given."""
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(api.reading(path))
        except FileNotFoundError as error:
            raise CheckpointError("the file is missing") from error
        except PermissionError:
            raise  # no fault of the checkpoint: verify would call it damaged
        except OSError as error:
            raise CheckpointError(error.strerror or str(error)) from error
        actual = os.fstat(fd).st_size
        if size is not None and actual != size:
            raise CheckpointError(f"it has {actual} bytes, expected {size}: it was cut off or changed")
        yield fd


def read_file(path: Path, most: int = TABLE_BYTES) -> bytes:
    """All of a table, of at most `most` bytes: a crafted file must not fill the memory."""
    with opened(path) as fd:
        try:
            return read_all(fd, path, most)
        except OSError as error:
            raise CheckpointError(error.strerror or str(error)) from error


def read_at(fd: int, nbytes: int, at: int) -> Tensor:
    """`nbytes` bytes from byte `at` on as a uint8 tensor."""
    data = empty(nbytes)
    read_into(fd, data.numpy().data, at)
    return data


def read_into(fd: int, view: memoryview, at: int) -> None:
    """Fill `view` from byte `at` on; one call of the system reads 2 GiB at most."""
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], at + done)
        if count == 0:
            raise CheckpointError(f"it ends at byte {at + done}, expected {len(view) - done} bytes more")
        done += count


def empty(nbytes: int) -> Tensor:
    """Memory for a file's bytes. Raises CheckpointError if they are too many: a crafted file can ask for any number."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:  # torch's way to say that there is no memory
        raise CheckpointError(f"its {nbytes} bytes don't fit into memory") from error


@contextmanager
def created(path: Path, rank: int) -> Iterator[int]:
    """The descriptor of a new file, which is on disk when the block ends; an OSError names the file, the rank and the node."""
    with naming(path, rank), api.created(path) as fd:
        yield fd


@contextmanager
def naming(path: Path, rank: int) -> Iterator[None]:
    """An OSError within the block, which writes `path`, becomes one that names the path, the rank and the node."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        # without the error's number, which would come first
        raise OSError(f"{reason} while writing {path} (rank {rank}, node {socket.gethostname()})") from error


class Output:
    """Writes a file from start to end, many small buffers with one call of the system."""

    MOST_BUFFERS = 1024  # IOV_MAX of Linux
    MOST_BYTES = 4 * 2**20  # so that little waits; a larger buffer goes out at once

    def __init__(self, fd: int) -> None:
        self._fd, self._at = fd, 0
        self._buffers: list[memoryview] = []
        self._waiting = 0

    def add(self, content: memoryview) -> None:
        """Write `content` next, soon; it must not change until then."""
        if not len(content):
            return
        self._buffers.append(content)
        self._waiting += len(content)
        if self._waiting >= self.MOST_BYTES or len(self._buffers) == self.MOST_BUFFERS:
            self.flush()

    def flush(self) -> None:
        """Write the waiting buffers; a call of the system writes 2 GiB at most."""
        while self._buffers:
            written = os.pwritev(self._fd, self._buffers, self._at)
            self._at += written
            while self._buffers and written >= len(self._buffers[0]):
                written -= len(self._buffers.pop(0))
            if written:
                self._buffers[0] = self._buffers[0][written:]
        self._waiting = 0


def memory_file() -> BinaryIO:
    """An unnamed file without a buffer, in memory where the system has that (Linux), else among temporary files."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("hpctrain"), "w+b", buffering=0)  # nobody else can open it
    return cast(BinaryIO, tempfile.TemporaryFile(buffering=0))


def write_file(path: Path, content: bytes, rank: int) -> None:
    """A new file with this content, on disk."""
    with created(path, rank) as fd:
        output = Output(fd)
        output.add(memoryview(content))
        output.flush()
