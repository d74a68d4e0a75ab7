"""Compares the tensors of two checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.errors import shown
from hpctrain.contracts.checkpoint import StoredTensor
from hpctrain_tools.checkpoint.batches import batches, read_batch
from hpctrain_tools.checkpoint.common import Checkpoint


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
