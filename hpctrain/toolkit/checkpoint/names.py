"""The names that a saved tensor may have in any format."""

from __future__ import annotations

from hpctrain.api import CheckpointError, shown


def check_printable(name: str) -> None:
    """CheckpointError for a name that would control the terminal that shows it, or that can't be shown at all."""
    if not name or not name.isprintable():
        raise CheckpointError(f"{shown(name)} can't name a saved tensor: expected printable characters")
