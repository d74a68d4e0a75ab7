"""Compares the tensors that the ranks ask for with those of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist

from hpctrain.base.errors import CheckpointError
from hpctrain.ranks.json_collectives import survey


def describe_differences(
    group: dist.ProcessGroup, wanted: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> str | None:
    """The differences between the tensors that all ranks together ask for and those of a file; None if there are none.

    `wanted` is this rank's part; `found` must be equal on all ranks.
    """
    missing = [f"{name} isn't there" for name in wanted if name not in found]
    reshaped = [
        f"{name} is {list(found[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in found and tuple(found[name]) != tuple(shape)
    ]
    unused = [f"{name} isn't in the model" for name in not_wanted(group, wanted, found)]

    def check() -> None:
        if missing or reshaped:
            raise CheckpointError(_first_few([*missing, *reshaped]))

    outcome = survey(group, check)
    if isinstance(outcome, Exception):
        return str(outcome)
    return _first_few(unused) if unused else None  # equal on all ranks


def not_wanted(group: dist.ProcessGroup, wanted: Collection[str], found: Iterable[str]) -> list[str]:
    """The names in `found` that no rank wants; `found` must be equal on all ranks. Sends only a byte per name."""
    names = list(found)
    used = torch.tensor([name in wanted for name in names], dtype=torch.uint8)
    if names:
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    return [name for name, taken in zip(names, used.tolist(), strict=True) if not taken]


def _first_few(sentences: list[str]) -> str:
    more = f" and {len(sentences) - 3} more" if len(sentences) > 3 else ""
    return "; ".join(sentences[:3]) + more
