"""The name of a run in a tracking service, kept in the run's directory: a resume continues it."""

from __future__ import annotations

from pathlib import Path

from hpctrain.api import read_all, reading, replacing


def kept_id(directory: Path) -> str | None:
    """The id that `keep_id` has kept there."""
    path = directory / "run-id"
    try:
        with reading(path) as fd:
            return read_all(fd, path, 1000).decode().strip() or None
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def keep_id(directory: Path, run_id: str) -> None:
    """Keep `run_id` in `directory`."""
    with replacing(directory / "run-id") as file:
        file.write(f"{run_id}\n".encode())
