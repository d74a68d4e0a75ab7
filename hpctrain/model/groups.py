"""The optimizer of a job and its parameter groups, from name patterns."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from typing import Any

import torch

from hpctrain.base.errors import UsageError
from hpctrain.contracts.breach import broken
from hpctrain.contracts.optimization import Optimizer
from hpctrain.contracts.pieces import Piece


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


def build_optimizer(plugin: Optimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """The plugin's optimizer over `groups`, each of which gets the plugin's options that it doesn't set.

    Raises UsageError for an optimizer that knows no `lr`, and ContractError unless it has every parameter once, at a learning
    rate that the job names.
    """
    options = plugin.options.model_dump()
    completed = [{**options, **group} for group in groups]
    optimizer = plugin.build([dict(group) for group in completed])
    known = [*optimizer.param_groups, *([optimizer.defaults] if optimizer.defaults else [])]
    if any("lr" not in one for one in known):
        raise UsageError(
            f"[optimizer] name = {plugin.name!r}: its parameter groups or its defaults have no 'lr', which the schedule sets; "
            'expected an optimizer that reads its learning rate from group["lr"]',
            everywhere=True,
        )
    wanted = {id(p): group["lr"] for group in completed for p in group["params"]}
    held = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    if sorted(id(p) for p, _ in held) != sorted(wanted):
        found = f"built an optimizer of {len(held)} tensors"
        raise broken(plugin, found, f"each of the {len(wanted)} in `groups` once; the others would not be trained")
    named = {value for value in options.values() if isinstance(value, float)}
    for parameter, group in held:
        rate, of_group = float(group["lr"]), wanted[id(parameter)]
        if not any(math.isclose(rate, one, rel_tol=1e-6) for one in (of_group, *named)):
            found = f"built an optimizer whose lr is {rate:g} where its group says {of_group:g}"
            raise broken(plugin, found, "the groups as they are, or each group's options")
    return optimizer


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
