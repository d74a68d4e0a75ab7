"""Batches and numbers between the program and the ranks: rows are split over the ranks with different samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.api import UsageError


def split(batch: Any, parts: int) -> list[Any]:
    """The batch in equal parts of consecutive rows: (rows, ...) tensors and arrays, in dicts, lists and tuples as they are.

    A list of as many references of Ray's as parts is given out as it is. Raises UsageError for rows that do not divide.
    """
    import ray

    if isinstance(batch, Sequence) and batch and all(isinstance(one, ray.ObjectRef) for one in batch):
        if len(batch) != parts:
            raise UsageError(
                f"found {len(batch)} references, expected one for each of {parts} ranks with different samples"
            )
        return list(batch)
    rows = {len(leaf) for leaf in _leaves(batch)}
    if len(rows) != 1:
        found = ", ".join(map(str, sorted(rows))) or "none"
        raise UsageError(f"found a batch of tensors with {found} rows, expected tensors with one number of rows")
    count = rows.pop()
    if count % parts or not count:
        raise UsageError(
            f"found a batch of {count} rows, expected a multiple of {parts}, the ranks with different samples"
        )
    share = count // parts
    return [_part(batch, slice(number * share, (number + 1) * share)) for number in range(parts)]


def _leaves(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in _leaves(value)]
    if isinstance(batch, (list, tuple)):
        return [leaf for value in batch for leaf in _leaves(value)]
    if not hasattr(batch, "shape") or not len(batch.shape):
        raise UsageError(f"found a {type(batch).__name__} in a batch, expected tensors or arrays of (rows, ...)")
    return [batch]


def _part(batch: Any, rows: slice) -> Any:
    if isinstance(batch, Mapping):
        return {key: _part(value, rows) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [_part(value, rows) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    part = batch[rows]
    return part.clone() if hasattr(part, "clone") else part  # else the whole tensor travels with each part


def mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over the ranks. Raises UsageError if they tell numbers of different names."""
    names = {tuple(sorted(one)) for one in found}
    if len(names) > 1:
        raise UsageError(
            f"found numbers of different names on the ranks: {', '.join(str(one) for one in sorted(names))}"
        )
    return {name: sum(one[name] for one in found) / len(found) for name in found[0]}
