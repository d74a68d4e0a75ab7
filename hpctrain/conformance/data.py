"""The first batch of a data set in each process: an item read twice is one item, and a batch has a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from hpctrain.contracts.dataset import Source
from hpctrain.errors import ContractError


def refuse_other_item(source: Source, index: int, first: Any, second: Any) -> None:
    """Raises ContractError if item `index`, read twice, has other tensors, arrays or numbers."""
    if not _is_same(first, second):
        drawn = "" if source.draws else "; a data set whose items draw random numbers says so with `draws = True`"
        raise ContractError(
            f"{_named(source)} gave another item {index} when it was read again, expected items that follow from their index "
            f"and seeded draws{drawn}"
        )


def refuse_fewer_rows(source: Source, items: int, batch: Any) -> None:
    """Raises ContractError if all tensors of a batch have the same number of rows, more than one, and fewer than its items.

    A batch that packs items into one row, or items of different lengths behind one another, has other shapes.
    """
    rows = {len(one) for one in _tensors(batch) if one.dim()}
    if len(rows) == 1 and 1 < (count := rows.pop()) < items:
        raise ContractError(
            f"{_named(source)} made a batch of {count} rows from {items} items in its collation, expected a row for each: the "
            "mean of the loss would be over fewer samples than the job says; leave items out in the data set"
        )


def _named(source: Source) -> str:
    return f"the data set {type(source).__module__}:{type(source).__qualname__}"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for one in inner for tensor in _tensors(one)]


def _is_same(first: Any, second: Any) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_is_same(value, second[key]) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(_is_same, first, second))
    if isinstance(first, (Tensor, np.ndarray)):
        one, other = (np.asarray(value.detach() if isinstance(value, Tensor) else value) for value in (first, second))
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(first, (int, float, str, bytes)):
        return bool(first == second or (first != first and second != second))
    return True  # an object of somebody's own
