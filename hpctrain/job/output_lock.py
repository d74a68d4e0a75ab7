"""One run at a time in an output directory: two would remove each other's unfinished checkpoints."""

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

from hpctrain.errors import UsageError, escaped
from hpctrain.files import open_to_change

FILE_NAME = "lock"
PATIENCE_SECONDS = 30.0
"""How long a run waits for another one that is just ending: a killed job is often started again at once."""


class OutputLock:
    """Rank 0's claim. The system lets go of it when this process ends, however it ends: nothing is left to clean up.

    It is a record lock: unlike flock's, no child that outlives this process keeps it, and NFS has it.
    """

    def __init__(self) -> None:
        self._file: IO[str] | None = None

    def take(self, directory: Path) -> None:
        """UsageError when another run keeps it. Where the file system has no locks there is none."""
        path, waits = directory / FILE_NAME, False
        fd = open_to_change(path, os.O_RDWR | os.O_APPEND)
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
        file.flush()
        self._file = file

    def release(self) -> None:
        """Let the next one in."""
        if self._file is not None:
            self._file.close()
            self._file = None


def set_aside(directory: Path) -> Path | None:
    """Rename the directory of an earlier run, which gets a number, and give its new name; None where there is no run in it.

    Raises UsageError while that run goes on, OSError where the directory can't be renamed.
    """
    if not any(os.path.lexists(directory / name) for name in ("job.resolved.toml", "metrics.jsonl", "checkpoints")):
        return None
    lock = OutputLock()
    lock.take(directory)
    try:
        names = (directory.with_name(f"{directory.name}.{number}") for number in itertools.count(1))
        return directory.rename(next(name for name in names if not os.path.lexists(name)))
    finally:
        lock.release()


def _locked(file: IO[str]) -> bool:
    """Whether nobody else has it."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)  # else there are no locks here
    return True
