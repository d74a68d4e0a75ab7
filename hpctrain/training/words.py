"""Figures of a step in words, for the screen of a run and for those who watch it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.base.errors import escaped

# seconds
_LONGEST = 1e9


def duration(seconds: float) -> str:
    """ "1:02:03" """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def slowest_rank(row: Mapping[str, Any]) -> str:
    """ "slowest rank 5 on node2: data +0.31 s"; "" for a row that names none. The row may be from another person's file."""
    found = row.get("straggler")
    if not isinstance(found, Mapping) or not isinstance(found.get("rank"), int):
        return ""
    node, cause, excess = (found.get(key) for key in ("node", "cause", "excess_seconds"))
    text = f"slowest rank {found['rank']}" + (f" on {escaped(node)}" if isinstance(node, str) else "")
    told = [escaped(cause)] if isinstance(cause, str) else []
    told += [f"+{excess:.2f} s"] if isinstance(excess, (int, float)) and abs(excess) < _LONGEST else []
    return text + (f": {' '.join(told)}" if told else "")
