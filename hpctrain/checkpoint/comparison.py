"""Compares the tensors that the ranks ask for with those of a checkpoint, and the tensors of two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import CheckpointError, shown
from hpctrain.checkpoint.finding import Checkpoint, batches, read_batch
from hpctrain.contracts.checkpoint import StoredTensor
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


@dataclass
class Difference:
    """A tensor that differs.

    forms: how dtype or shape differ, or where the tensor is missing. elements: the number of different values, of `total`.
    largest: the largest |a - b|. relative: |a - b| / |a| over the whole tensor, by the 2-norm.
    """

    name: str
    forms: str = ""
    elements: int = 0
    total: int = 0
    largest: float = 0.0
    relative: float = 0.0


def compare(a: Checkpoint, b: Checkpoint, progress: Callable[[int, int], None] | None = None) -> list[Difference]:
    """The tensors that differ, in a's order and then b's. NaNs in the same place count as equal.

    `progress(done, total)` is called with bytes of `a` during the reading.
    """
    mine, theirs = a.format.tensors(a.path), b.format.tensors(b.path)
    differences = {name: _difference_of_form(name, mine.get(name), theirs.get(name)) for name in {**mine, **theirs}}
    shared = {name: one for name, one in mine.items() if name in theirs and one.shape == theirs[name].shape}
    sums = dict.fromkeys(shared, (0.0, 0.0))
    done, total = 0, sum(one.nbytes for one in shared.values())
    for batch in batches(shared):
        parts = zip(batch, read_batch(a, mine, batch), read_batch(b, theirs, batch), strict=True)
        for (name, _, _), one, other in parts:
            sums[name] = _add(differences[name], sums[name], one, other)
            done += one.nbytes
        if progress is not None:
            progress(done, total)
    for name, (apart, size) in sums.items():
        differences[name].relative = math.sqrt(apart / size) if size else (math.inf if apart else 0.0)
    return [one for one in differences.values() if one.forms or one.elements]


def compare_values(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """A sentence per small value that differs."""
    missing = object()
    pairs = [(key, a.get(key, missing), b.get(key, missing)) for key in {**a, **b}]
    return [
        f"{key}: only in {'B' if one is missing else 'A'}"
        if missing in (one, other)
        else f"{key}: {shown(one)} in A, {shown(other)} in B"
        for key, one, other in pairs
        if one != other
    ]


def _difference_of_form(name: str, one: StoredTensor | None, other: StoredTensor | None) -> Difference:
    if one is None or other is None:
        return Difference(name, f"only in {'B' if one is None else 'A'}")
    form, other_form = (f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in (one, other))
    return Difference(name, "" if form == other_form else f"{form} in A, {other_form} in B", total=math.prod(one.shape))


def _add(difference: Difference, sums: tuple[float, float], one: Tensor, other: Tensor) -> tuple[float, float]:
    """Add a part to `difference`; returns the new sums of |a - b|^2 and |a|^2."""
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    unequal = (one != other) if one.dtype == other.dtype and not _is_small(one.dtype) else (a != b)
    unequal &= ~(a.isnan() & b.isnan())
    apart = (a - b).abs()[unequal]
    difference.elements += int(unequal.sum())
    if len(apart):
        largest = float(apart.max())
        difference.largest = largest if math.isnan(largest) else max(difference.largest, largest)
    return sums[0] + float((apart**2).sum()), sums[1] + float((a.abs() ** 2).sum())


def _is_small(dtype: torch.dtype) -> bool:
    """8-bit floats, which torch doesn't compare."""
    return dtype.is_floating_point and dtype.itemsize == 1
