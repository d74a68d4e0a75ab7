"""Directories of ranks on a node, closed to other users: each is of one start, with the job's secret, and the rank's end."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir

from hpctrain.toolkit.starting import Ending, ending_in

_PREFIX = "hpctrain-ray-"
_OWNER = "owner"
"""The file with the id of the process that the directory is of."""
_ASKED_ABOUT = 3600.0
"""Seconds for which the directory of a killed process stays, at least: somebody may ask how it has ended."""
_SECRET_BYTES = 32


def new_secret() -> bytes:
    """A secret for the ranks of one start."""
    return secrets.token_bytes(_SECRET_BYTES)


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


def take_ending(directory: Path) -> Ending:
    """The end of the rank whose directory it was; removes it. Runs on its node."""
    found = ending_in(directory)
    shutil.rmtree(directory, ignore_errors=True)
    return found


def _remove_abandoned() -> None:
    for owner in Path(gettempdir()).glob(f"{_PREFIX}*/{_OWNER}"):
        with suppress(OSError, ValueError):  # another user's, or removed meanwhile
            found = os.lstat(owner)  # before it is opened: another user may have put a pipe there
            is_own = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
            if is_own and time.time() - found.st_mtime > _ASKED_ABOUT and not _runs(int(owner.read_text())):
                shutil.rmtree(owner.parent, ignore_errors=True)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
