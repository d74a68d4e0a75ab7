"""Counts the bytes of live tensors, for benchmarks and tests of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """bytes: of all living storages that operators made in this context. peak: the maximum of bytes.

    An operator that brings them above `limit` raises MemoryError, as an allocator would.
    """

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self._limit = limit
        self.bytes = self.peak = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls this again with the local tensors
        for tensor in tree_leaves((args, kwargs)):  # earlier storages do not count, such as a parameter behind a view
            if isinstance(tensor, torch.Tensor):
                self._seen.add(tensor.untyped_storage())
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._seen:
                storage = tensor.untyped_storage()
                self._seen.add(storage)
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self._gone, storage.nbytes())
        if self._limit is not None and self.bytes > self._limit:
            raise MemoryError(f"{self.bytes / 1e6:.1f} MB alive, with a limit of {self._limit / 1e6:.1f} MB")
        return out

    def _gone(self, nbytes: int) -> None:
        self.bytes -= nbytes
