"""Checks of the output directory: one directory on all nodes, its speed, its locks and its space."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpctrain.base.errors import reason
from hpctrain.base.safe_files import closed_directory
from hpctrain.contracts.identity import Identity
from hpctrain_tools.doctor.findings import Finding, tried

_LOCK = "lock"
_TOKEN = "token"
_BYTES, _SLOW_BYTES = 16 * 2**20, 20e6
_FREE = 5 * 2**30
# how long a file of another node may take to appear
_SEEN_SECONDS = 5.0


@dataclass(frozen=True)
class TrialDirectory:
    """Rank 0's directory for the checks. error: the reason why there is none."""

    path: str
    token: str
    error: str | None = None


@contextmanager
def scratch_of_first(directory: Path) -> Iterator[TrialDirectory]:
    """Made by rank 0 in `directory`, with a locked file; gone afterwards."""
    token, base = secrets.token_hex(16), directory.absolute()
    try:
        path = closed_directory("doctor-", base)
    except OSError as error:
        yield TrialDirectory(str(base), token, error.strerror)
        return
    try:
        scratch, file = _fill(path, token)
        with file or nullcontext():
            yield scratch
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _fill(path: Path, token: str) -> tuple[TrialDirectory, IO[str] | None]:
    """The token and the locked file; the file stays locked until it is closed."""
    try:
        (path / _TOKEN).write_text(token)
        file = open(path / _LOCK, "w")  # noqa: SIM115 - open means locked
    except OSError as error:
        return TrialDirectory(str(path), token, error.strerror), None
    with suppress(OSError):  # no locks here: `lock_of_first` meets the same error
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return TrialDirectory(str(path), token), file


def directory_checks(identity: Identity, directory: Path, scratch: TrialDirectory) -> list[Finding]:
    """Check the directory on one rank of each node, and on rank 1, which tries the locks where the job has one node."""
    leader = identity.local_rank == 0
    if scratch.error is not None:
        if identity.rank:
            return []
        return [Finding("output directory", "fail", f"rank 0 can't write in {directory}: {scratch.error}",
                        "give --directory a directory that exists and that you may write to on all nodes")]  # fmt: skip
    seen = tried("output directory", lambda: same(identity, Path(scratch.path), scratch.token)) if leader else None
    findings = [] if seen is None else [seen]
    if seen is not None and seen.state == "ok":
        path = Path(scratch.path)
        findings += [
            tried("write speed", lambda: write_speed(path / f"speed-{identity.rank}")),
            tried("free space", lambda: free_space(path)),
        ]
    if identity.rank and (leader or identity.rank == 1) and (seen is None or seen.state == "ok"):
        findings.append(tried("file locks", lambda: lock_of_first(Path(scratch.path) / _LOCK)))
    if identity.size == 1:
        findings.append(tried("file locks", lambda: own_lock(Path(scratch.path) / f"{_LOCK}-0")))
    return findings


def same(identity: Identity, scratch: Path, token: str) -> Finding:
    """Whether this node sees rank 0's file and may write beside it."""
    check, give_up = "output directory", time.monotonic() + _SEEN_SECONDS
    while not (scratch / _TOKEN).exists() and time.monotonic() < give_up:
        time.sleep(0.1)
    if not (scratch / _TOKEN).exists() or (scratch / _TOKEN).read_text() != token:
        return Finding(check, "fail", f"{scratch.parent} is not rank 0's directory: its file does not appear here",
                       "use a directory on a file system that all nodes share")  # fmt: skip
    try:
        (scratch / f"write-{identity.rank}").write_text(token)
    except OSError as error:
        return Finding(check, "fail", f"{scratch.parent} can't be written to: {reason(error)}",
                       "mount it writable on this node, for this user")  # fmt: skip
    return Finding(check, "ok", f"{scratch.parent} is writable and rank 0's")


def write_speed(path: Path) -> Finding:
    """Bytes per second of one file, until it is on the disk."""
    content, begin = os.urandom(_BYTES), time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        file.write(content)
        os.fsync(file.fileno())
    speed = _BYTES / (time.perf_counter() - begin)
    if speed < _SLOW_BYTES:
        return Finding("write speed", "warn", f"{speed / 1e6:,.0f} MB/s for a file of {_BYTES // 2**20} MiB: checkpoints "
                       "will be slow", "use a parallel file system or a local disk for output_dir")  # fmt: skip
    return Finding("write speed", "ok", f"{speed / 1e6:,.0f} MB/s")


def free_space(path: Path) -> Finding:
    """The space that is left where checkpoints will be."""
    usage = shutil.disk_usage(path)
    found = f"{usage.free / 2**30:,.1f} GiB of {usage.total / 2**30:,.1f} GiB"
    if usage.free < _FREE:
        return Finding("free space", "warn", found, "delete files, or use another directory; a checkpoint takes about "
                       "three times the parameters' bytes")  # fmt: skip
    return Finding("free space", "ok", found)


def lock_of_first(path: Path) -> Finding:
    """Whether rank 0's record lock keeps this process out."""
    with open(path, "r+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return Finding("file locks", "ok", "rank 0's lock holds")
        except OSError as error:
            return _no_locks(error)
    return Finding("file locks", "warn", "rank 0's lock does not hold here: two runs in one directory would not notice "
                   "each other", "mount the file system with locks (NFS: without nolock; Lustre: -o flock)")  # fmt: skip


def own_lock(path: Path) -> Finding:
    """Whether the file system has record locks."""
    with open(path, "w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return _no_locks(error)
    return Finding("file locks", "ok", "the file system has record locks")


def _no_locks(error: OSError) -> Finding:
    return Finding("file locks", "warn", f"the file system has no locks: {error.strerror}",
                   "mount it with locks (NFS: without nolock; Lustre: -o flock), and start one run per directory")  # fmt: skip
