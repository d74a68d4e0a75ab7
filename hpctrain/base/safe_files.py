"""The files of a run and of a checkpoint: opened without following links, checked before reading, replaced atomically.

The directory may be crafted: a pipe that blocks, a link to another file of the user's, an endless file. Refusals are
OSErrors, like the system's own. Imports nothing from hpctrain.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = [
    "closed_directory", "is_only_ours", "is_own_directory", "own_directory", "read_bytes",
    "reading", "replacing", "scratch_directory", "temporary_place",
]  # fmt: skip

SMALL_BYTES = 16 * 2**20
"""Far more than a list of names or a resolved job needs."""
_UNMAPPED = 65534  # the owner of root's directories in a container that maps this user only
TABLE_BYTES = 128 * 2**20
"""Far more than a JSON table needs: the largest one measured had 1 MB."""
# names in the directory of a run; contracts/scheduler.py has those of a submitted one
RESOLVED = "job.resolved.toml"
"""The job with every default written out, as its newest start found it."""
METRICS = "metrics.jsonl"
"""The rows of steps and evaluations."""
STARTS = "starts.jsonl"
"""A line for each start, and one for each time that steps were lost."""
CHECKPOINTS = "checkpoints"
LOGS = "log"


def log_of(directory: Path, rank: int) -> Path:
    """A rank's log."""
    return directory / LOGS / f"rank-{rank:05d}.log"


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """The descriptor of a regular file; refuses symbolic links. `flags` may create the file."""
    try:
        # O_NONBLOCK: opening a pipe must not wait for its other end.
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if path.is_symlink():
            raise _refused(errno.ELOOP, "it is a symbolic link, expected the file itself", path) from error
        if error.errno == errno.ENXIO:  # a socket, or a pipe without a reader
            raise _refused(errno.ENXIO, "it is no regular file", path) from error
        raise
    found = os.fstat(fd)
    if stat.S_ISREG(found.st_mode):
        return fd
    os.close(fd)
    raise _refused(errno.EINVAL, "it is no regular file", path)


def open_to_change(path: Path, flags: int) -> int:
    """Open a file as `open_regular` does, but creates a missing file and refuses a file with several names (hard links)."""
    fd = open_regular(path, flags | os.O_CREAT)
    names = os.fstat(fd).st_nlink
    if names > 1:
        os.close(fd)
        raise _refused(errno.EMLINK, f"it has {names} names (hard links), expected one: copy it", path)
    return fd


def is_only_ours(found: os.stat_result) -> bool:
    """Whether a file is this user's, and nobody else can write it: then it may be run."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def is_closed(found: os.stat_result) -> bool:
    """Whether a file or directory is this user's, and nobody else can read or write it; no link is."""
    return found.st_uid == os.geteuid() and not found.st_mode & 0o077


def temporary_place() -> Path:
    """$TMPDIR or /tmp, where other users may be able to write."""
    return Path(tempfile.gettempdir())


def closed_directory(name: str = "", within: Path | None = None) -> Path:
    """A new directory, closed to others, in the temporary directory or `within` another one. name: a part of its name."""
    return Path(tempfile.mkdtemp(prefix=f"hpctrain-{name}", dir=within))


@contextmanager
def scratch_directory(name: str = "", within: Path | None = None) -> Iterator[Path]:
    """`closed_directory`, removed when the block ends."""
    directory = closed_directory(name, within)  # not TemporaryDirectory, which a forked rank would remove at its end
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def own_directory(path: Path, exist_ok: bool = True) -> Path:
    """Make a directory whose name others may know, unless it exists. OSError unless it is this user's, and closed to others."""
    path.mkdir(mode=0o700, parents=True, exist_ok=exist_ok)
    if not is_closed(path.lstat()):
        raise _refused(
            errno.EACCES, "other users may use it, expected a directory of yours with permissions 0700", path
        )
    return path


def stays(directory: Path) -> bool:
    """Whether nobody else but root can put another directory in its place."""
    mine, parent = {os.geteuid(), 0, _UNMAPPED}, directory.parent.resolve()
    above = [one.stat() for one in (parent, *parent.parents) if one.parent != one]  # / is the container's
    return all(one.st_uid in mine and (not one.st_mode & 0o022 or one.st_mode & stat.S_ISVTX) for one in above)


@contextmanager
def reading(path: Path) -> Iterator[int]:
    """The descriptor of a regular file."""
    fd = open_regular(path)
    try:
        yield fd
    finally:
        os.close(fd)


def read_bytes(path: Path, most: int = SMALL_BYTES) -> bytes:
    """The content of a regular file; OSError if it has more than `most` bytes."""
    with reading(path) as fd:
        return read_all(fd, path, most)


def read_all(fd: int, path: Path, most: int) -> bytes:
    """The content of the open file `path`; OSError if it has more than `most` bytes."""
    size = os.fstat(fd).st_size
    if size > most:
        raise _refused(errno.EFBIG, f"it has {size} bytes, expected at most {most}", path)
    with open(fd, "rb", closefd=False) as file:
        return file.read(size)


@contextmanager
def created(path: Path, mode: int = 0o666) -> Iterator[int]:
    """The descriptor of a new file; synced to disk when the block ends. mode: its permissions, reduced by the umask."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        yield fd
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """A new file that atomically replaces `path` when the block ends without an error and the file is on disk."""
    temporary = temporary_name(path)
    try:
        with created(temporary, mode) as fd, open(fd, "wb", closefd=False) as file:
            yield file
            file.flush()
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """A name for `path` until it is complete: beside it, and impossible to guess."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def cache_directory() -> Path:
    """The directory of files that this user's programs can make again: $XDG_CACHE_HOME or ~/.cache, in a folder of hpctrain's
    own."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given if os.path.isabs(given) else os.path.expanduser("~/.cache"), "hpctrain")


def make_directory(path: Path) -> None:
    """Make a directory within a run unless it exists; OSError if a link or another file is in its place."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if path.is_symlink():
            raise _refused(errno.ELOOP, "it is a symbolic link, expected the directory itself", path) from None
        if not path.is_dir():
            raise


def is_own_directory(path: Path) -> bool:
    """Whether `path` is a directory and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def sync_directory(directory: Path) -> None:
    """fsync a directory, so that the names in it survive a power failure."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refused(number: int, why: str, path: Path) -> OSError:
    return OSError(number, why, str(path))
