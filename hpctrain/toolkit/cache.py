"""Files that are costly to make, kept for later jobs in a directory that jobs and nodes may share.

A file is its content, the maker's note as JSON, and a foot: the length of the note, a checksum of the name and of everything
before the foot, and a mark. Content begins at byte 0, so that it can be mapped into memory.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from hpctrain.api import EnvironmentUnfitError, created, reading, reason, temporary_name

Write = Callable[[memoryview], None]

_FOOT = struct.Struct("<Q16s8s")
_MARK = b"hpckept2"
_CHUNK = 2**20
# names of `temporary_name`; the directory may have other hidden files
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
# the age at which an unfinished file counts as left behind by a job that was killed
_ABANDONED_SECONDS = 86400.0


def kept(directory: Path, name: str, make: Callable[[Write], Any]) -> tuple[Path, Any]:
    """The file `name` and its note, made by an earlier job or now.

    make: calls `write(part)` for each part of the content and returns the note, a JSON value. `name` must name everything that
    the content depends on, such as a hash of it. Any number of processes may call this at the same time: a complete file is never
    replaced, since others may have it mapped. A file that is damaged, or another user's, is made again. Only this user can
    read the files. Raises EnvironmentUnfitError if the directory can't be written to.
    """
    path = directory / name
    complete = _note(path)
    if complete:
        return path, complete[0]
    temporary = temporary_name(path)
    try:
        os.makedirs(directory, 0o700, exist_ok=True)
        _remove_abandoned(directory)  # before a file is written: the disk may be full of them
        with created(temporary, 0o600) as fd, open(fd, "wb", closefd=False) as file:
            note = _write(file, name, make)
            file.flush()
        return path, _place(temporary, path, note)
    except OSError as error:
        raise _unwritable(directory, reason(error)) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def refuse_unwritable(directory: Path) -> None:
    """Raises EnvironmentUnfitError if `directory` is empty or missing, and can't be written to. For `hpctrain check`."""
    try:
        if any(directory.iterdir()):
            return  # `kept` needs to write only what is not there yet
    except OSError:
        pass  # it doesn't exist, or what stands there is no directory
    nearest = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not (nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)):
        why = "no permission" if nearest.is_dir() else f"{nearest} is not a directory"
        raise _unwritable(directory, why)


def _unwritable(directory: Path, why: str) -> EnvironmentUnfitError:
    return EnvironmentUnfitError(
        f"the cache {directory} can't be written to ({why}); name another directory: [dataset] cache"
    )


def _write(file: BinaryIO, name: str, make: Callable[[Write], Any]) -> Any:
    digest = xxhash.xxh3_128(name.encode())  # with the name: a file under another name is not what it promises

    def write(part: memoryview) -> None:
        digest.update(part)
        file.write(part)

    note = make(write)
    text = json.dumps(note).encode()
    write(memoryview(text))
    file.write(_FOOT.pack(len(text), digest.digest(), _MARK))
    return note


def _place(temporary: Path, path: Path, note: Any) -> Any:
    """Give the complete file its name, unless another process was faster; return the note of the file that is there."""
    try:
        os.link(temporary, path)  # unlike a rename, it replaces no file that others have mapped: over NFS, SIGBUS
        return note
    except FileExistsError:
        other = _note(path)
        if other:
            return other[0]
    except OSError:
        pass  # a file system without hard links
    temporary.replace(path)
    return note


def _note(path: Path) -> tuple[Any] | None:
    """The note of a file; None if it is missing, damaged or another user's."""
    try:
        with reading(path) as fd, open(fd, "rb", closefd=False) as file:
            info = os.fstat(fd)
            size = info.st_size - _FOOT.size
            if info.st_uid != os.geteuid() or size < 0:  # another user may write whatever fits the checksum
                return None
            digest, left = xxhash.xxh3_128(path.name.encode()), size
            while left and (part := file.read(min(left, _CHUNK))):  # in parts: the file may be larger than memory
                digest.update(part)
                left -= len(part)
            length, checksum, mark = _FOOT.unpack(file.read(_FOOT.size))
            if mark != _MARK or checksum != digest.digest() or length > size:
                return None
            file.seek(size - length)
            return (json.loads(file.read(length)),)
    except (OSError, ValueError, struct.error):
        return None


def _remove_abandoned(directory: Path) -> None:
    for path in directory.glob(".*.tmp"):
        with suppress(OSError):  # another process has removed it first
            info = path.lstat()
            is_old = time.time() - info.st_mtime > _ABANDONED_SECONDS
            if is_old and info.st_uid == os.geteuid() and _TEMPORARY.fullmatch(path.name):
                path.unlink()
