"""Directories of ranks on a node, closed to other users: each is of one start, with the job's secret, and the rank's end."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from hpctrain.starting.channel_directory import Ending, ending_in, sweep
from hpctrain.toolkit.commands import own_directory, replacing, temporary_place

_PREFIX = "hpctrain-ray-"
_ASKED_ABOUT = 600.0
"""Seconds for which the directory of a killed process stays, at least: somebody may ask how it has ended."""
_SECRET_BYTES = 32


def new_secret() -> bytes:
    """A secret for the ranks of one start."""
    return secrets.token_bytes(_SECRET_BYTES)


def make_private_directory(token: str, rank: int, secret: bytes) -> Path:
    """A new directory for the start `token` of a rank, which becomes a `ChannelDirectory`. Those that killed processes have left on
    this node go."""
    sweep(f"{_PREFIX}*", _ASKED_ABOUT)
    directory = own_directory(temporary_place() / f"{_PREFIX}{token}.{rank}", exist_ok=False)
    with replacing(directory / "secret", 0o600) as file:
        file.write(secret.hex().encode())
    return directory


def take_ending(directory: Path) -> Ending:
    """The end of the rank whose directory it was; removes it. Runs on its node."""
    found = ending_in(directory)
    shutil.rmtree(directory, ignore_errors=True)
    return found
