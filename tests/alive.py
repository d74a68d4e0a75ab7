"""Measures the memory of tensors from outside of what makes them."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Bytes of all storages that operators have made since and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # it comes back with the local tensors
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage() not in self._seen:
                storage = tensor.untyped_storage()
                self._seen.add(storage)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        return out

    def _gone(self, nbytes: int) -> None:
        self.bytes -= nbytes
