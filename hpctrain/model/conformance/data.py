"""The first batch of a data set in each process: an item read twice is one item, and a batch has a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.base.errors import ContractError
from hpctrain.contracts.dataset import Source


def refuse_other_item(source: Source, index: int, first: Any, second: Any) -> None:
    """Raises ContractError if item `index`, read twice, has other tensors, arrays or numbers."""
    if not _is_same(first, second):
        raise ContractError(
            f"{_named(source)} gave another item {index} when it was read again, expected items that follow from their index; a "
            "data set whose items draw random numbers says so with `draws = True`"
        )


def refuse_fewer_rows(source: Source, items: int, batch: Any) -> None:
    """Raises ContractError if all tensors of a batch have the same number of rows, fewer than its items and more than half of them.

    A batch that packs items into fewer rows, or has them in another dim, has other shapes.
    """
    tensors = [one for one in _tensors(batch) if one.dim()]
    rows = {len(one) for one in tensors}
    elsewhere = any(items in one.shape for one in tensors)
    if not elsewhere and len(rows) == 1 and items / 2 < (count := rows.pop()) < items:
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
    if isinstance(first, Tensor):
        return _bits(first) == _bits(second)
    if isinstance(first, np.ndarray) and first.dtype != object:
        return bool(first.dtype == second.dtype and first.shape == second.shape and first.tobytes() == second.tobytes())
    if isinstance(first, (int, float, str, bytes)):
        return bool(first == second or (first != first and second != second))
    return True  # an object of somebody's own


def _bits(tensor: Tensor) -> object:
    """The form and the bytes of a tensor; None for one that has no plain memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()
