"""The directories of a user's ranks on a node, closed to others: each is of one start, with the job's secret."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

_PREFIX = "hpctrain-ray-"
_OWNER = "owner"
"""The file with the id of the process that removes the directory, unless it is killed."""
_ASKED_ABOUT = 3600.0
"""Seconds for which the directory of a process that has ended stays, at least: somebody may ask how it has ended."""


def make_private_directory(token: str, rank: int, secret: bytes) -> Path:
    """A new directory for the start `token` of a rank. Those that killed processes have left on this node go."""
    _remove_abandoned()
    directory = Path(gettempdir(), f"{_PREFIX}{token}.{rank}")
    directory.mkdir(mode=0o700)
    file = os.open(directory / "secret", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(file, "w") as stream:
        stream.write(secret.hex())
    (directory / _OWNER).write_text(str(os.getpid()))
    return directory


def _remove_abandoned() -> None:
    for owner in Path(gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with suppress(OSError, ValueError):  # another user's, or removed meanwhile
            found, process = os.lstat(owner), int(owner.read_text())
            if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _ASKED_ABOUT and not _runs(process):
                shutil.rmtree(owner.parent, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
