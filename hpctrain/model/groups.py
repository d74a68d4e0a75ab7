"""Parameter groups for the optimizer, from name patterns."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from hpctrain.contracts.pieces import Piece
from hpctrain.errors import UsageError


def parameter_groups(
    pieces: Sequence[Piece], trained: Sequence[str], patterns: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """torch's parameter groups: one for each entry of `patterns`, and one for the other parameters.

    A parameter goes to the first entry that matches. `trained` are the names of the full model. Raises UsageError for a
    pattern that matches none of them. A group with any of these parameters exists on every rank, even if empty there.
    """
    rest: dict[str, Any] = {"params": []}
    groups: list[dict[str, Any]] = [
        {"params": [], **{key: value for key, value in entry.items() if key != "pattern"}} for entry in patterns
    ]
    for piece in pieces:
        _group_of(piece.name, patterns, groups, rest)["params"].append(piece.tensor)
    refuse_unmatched(trained, patterns)
    used = {id(_group_of(name, patterns, groups, rest)) for name in trained}
    return [group for group in [*groups, rest] if id(group) in used]


def refuse_unmatched(trained: Sequence[str], patterns: Sequence[dict[str, Any]]) -> None:
    """Raises UsageError for a pattern that matches none of the names of trained parameters."""
    for entry in patterns:
        for pattern in entry["pattern"]:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in trained):
                names = ", ".join(trained[:5])
                raise UsageError(
                    f"[[optimizer.groups]] pattern: no trained parameter matches {pattern!r}; the names are like {names}, ..."
                )


def _group_of(
    name: str, patterns: Sequence[dict[str, Any]], groups: list[dict[str, Any]], rest: dict[str, Any]
) -> dict[str, Any]:
    for entry, group in zip(patterns, groups, strict=True):
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in entry["pattern"]):
            return group
    return rest
