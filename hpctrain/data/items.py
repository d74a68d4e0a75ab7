"""The first batch of a data set in each process: items have memory of their own and follow from their index, and a batch has a row
for each."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.base.errors import ContractError
from hpctrain.contracts.model import tensors_in

LOG = logging.getLogger("hpctrain")


def snapshot(item: Any) -> object:
    """The tensors, arrays, numbers and texts of an item as they are now, to compare with. Objects of other types are all alike."""
    if isinstance(item, Mapping):
        return type(item), [(key, snapshot(value)) for key, value in item.items()]
    if isinstance(item, (list, tuple)):
        return type(item), [snapshot(value) for value in item]
    if isinstance(item, Tensor):
        return _bits(item)
    if isinstance(item, np.ndarray) and item.dtype != object:
        return item.dtype, item.shape, item.tobytes()
    return type(item), repr(item) if isinstance(item, (int, float, str, bytes)) else None


def refuse_other_item(name: str, index: int, before: object, again: Any, draws: bool) -> None:
    """Refuse an item `index` that, read again, is not as in the snapshot `before`. name: of the data set. draws: whether its items
    may draw random numbers, which are seeded: then it is only told.

    Raises ContractError.
    """
    if snapshot(again) == before:
        return
    if draws:
        LOG.warning(
            "%s gave another item %d when it was read again, although Python's, NumPy's and torch's generators and those that it "
            "keeps are seeded: this run can't be repeated, and ranks and resumes draw differently; in an item, seed a generator by "
            "the index, as numpy.random.default_rng(index)", name, index,
        )  # fmt: skip
        return
    raise ContractError(
        f"{name} gave another item {index} when it was read again, expected items that follow from their index; a data set whose "
        "items draw random numbers says so with `draws = True`"
    )


def refuse_reused_memory(name: str, before: object, item: Any) -> None:
    """Raises ContractError if an item is not as in the snapshot `before` once the next ones were read."""
    if snapshot(item) != before:
        raise ContractError(
            f"{name} gave an item whose values change when the next one is read, expected memory of its own for each item: a "
            "micro batch would be one item, repeated; return a copy (`.clone()`, `.copy()`)"
        )


def refuse_fewer_rows(name: str, items: int, batch: Any) -> None:
    """Raises ContractError if all tensors of a batch have the same number of rows, fewer than its items and more than half of them.

    A batch that packs items into fewer rows, or has them in another dim, has other shapes.
    """
    tensors = [one for one in tensors_in(batch) if one.dim()]
    rows = {len(one) for one in tensors}
    elsewhere = any(items in one.shape for one in tensors)
    if not elsewhere and len(rows) == 1 and items / 2 < (count := rows.pop()) < items:
        raise ContractError(
            f"{name} made a batch of {count} rows from {items} items in its collation, expected a row for each: the "
            "mean of the loss would be over fewer samples than the job says; leave items out in the data set"
        )


def _bits(tensor: Tensor) -> object:
    """The form and the bytes of a tensor; None for one that has no plain memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()
