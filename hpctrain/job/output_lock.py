"""Lock of an output directory, for one run at a time: two would remove each other's unfinished checkpoints."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import platform
import sys
import time
from pathlib import Path
from typing import IO

from hpctrain.base.errors import UsageError, escaped
from hpctrain.base.safe_files import CHECKPOINTS, METRICS, RESOLVED, open_to_change

FILE_NAME = "lock"
PATIENCE_SECONDS = 30.0
"""How long a run waits for another one to end: a killed job is often restarted at once."""


class OutputLock:
    """Rank 0's lock. The system releases it when this process ends in any way, so it needs no cleanup.

    It is a record lock: unlike flock's, a child that outlives this process does not keep it, and it works on NFS.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, directory: Path) -> None:
        """Take the lock; UsageError if another run keeps it. Does nothing if the file system has no locks."""
        path, waits = directory / FILE_NAME, False
        fd = open_to_change(path, os.O_RDWR | os.O_APPEND)  # not truncated: it says who holds it
        file = open(fd, "a+", encoding="utf-8", errors="replace")  # noqa: SIM115 - open means locked
        give_up = time.monotonic() + PATIENCE_SECONDS
        while not _locked(file):
            file.seek(0)
            owner = escaped(file.read(200).partition("\n")[0]).strip() or "another run"
            if time.monotonic() > give_up:
                raise UsageError(
                    f"[job] output_dir: {directory} is in use by {owner}; wait for its end or use another output_dir "
                    f"(if that run is gone, delete {path})"
                )
            if not waits:
                print(f"hpctrain: {directory} is in use by {owner}; waiting for its end", file=sys.stderr, flush=True)
                waits = True
            time.sleep(0.1)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}\n")
        file.flush()  # the file stays open, so nothing else writes this out
        self._file = file

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def set_aside(directory: Path) -> Path | None:
    """Rename the directory of an earlier run by adding a number; returns the new name, or None if it holds no run.

    Raises UsageError if that run is still going on, OSError if the directory can't be renamed.
    """
    if not any(os.path.lexists(directory / name) for name in (RESOLVED, METRICS, CHECKPOINTS)):
        return None
    lock = OutputLock()
    lock.take(directory)  # waits for a run that is about to end
    try:
        names = (directory.with_name(f"{directory.name}.{number}") for number in itertools.count(1))
        return directory.rename(next(name for name in names if not os.path.lexists(name)))
    finally:
        lock.close()


def _locked(file: IO[str]) -> bool:
    """Try to take the lock; true if nobody else has it, and where the file system has no locks."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # any other error: no locks here
    return True
