"""Any map-style dataset: something with __len__ and __getitem__."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from hpctrain.contracts.dataset import Dataset, DatasetContext, Lengths, Samples, Split
from hpctrain.errors import UsageError
from hpctrain.foreign.calling import users_code
from hpctrain.foreign.reference import refuse_arguments, resolve

_PROBES = 16
"""Samples that go into the fingerprint of a dataset that has none of its own."""


class ForeignDataset(Dataset):
    """Calls callable(split="train" | "validation", **options); None means that there is no such split."""

    name = "package.module:callable"

    def __init__(self, reference: str, factory: Callable[..., Any], options: dict[str, Any]) -> None:
        super().__init__(options)
        self.name = self.reference = reference  # type: ignore[misc]  # for messages: what the job file calls it
        self._factory = factory

    @classmethod
    def from_table(cls, reference: str, options: dict[str, Any]) -> ForeignDataset:
        """Raises UsageError for a callable that is not there or does not take the options."""
        factory = resolve(reference)
        refuse_arguments(reference, factory, {"split": "train", **options})
        return cls(reference, factory, options)

    def open(self, split: Split, context: DatasetContext) -> Samples | None:
        what = f"[dataset] name = {self.reference!r}"
        with users_code(what):
            source = self._factory(split=split, **self.options)
        if source is None:
            return None
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise UsageError(f"{what} returned {type(source).__name__}, expected __len__ and __getitem__")
        return _ForeignSamples(self.reference, source)


class _ForeignSamples(Samples):
    def __init__(self, reference: str, source: Any) -> None:
        self._reference, self._source = reference, source

    def __len__(self) -> int:
        with self._calling("__len__()"):
            return len(self._source)

    def __getitem__(self, index: int) -> Any:
        with self._calling(f"__getitem__({index})"):
            return self._source[index]

    def lengths(self) -> Lengths | None:
        """The dataset's own `lengths()` where it has one."""
        if not hasattr(self._source, "lengths"):
            return None
        with self._calling("lengths()"):
            return np.asarray(self._source.lengths(), dtype=np.int64)

    def fingerprint(self) -> str:
        """The dataset's own `fingerprint()` where it has one, else its length and a few samples' bytes."""
        if hasattr(self._source, "fingerprint"):
            with self._calling("fingerprint()"):
                return str(self._source.fingerprint())
        digest = hashlib.blake2b(f"{self._reference} {len(self)}".encode(), digest_size=16)
        step = max(1, len(self) // _PROBES)
        for index in range(0, len(self), step):
            sample, buffer = self[index], io.BytesIO()
            with self._calling(f"pickling sample {index}, for want of a fingerprint(),"):
                torch.save(sample, buffer)
            digest.update(buffer.getvalue())
        return digest.hexdigest()

    def _calling(self, method: str) -> AbstractContextManager[None]:
        return users_code(f"[dataset] name = {self._reference!r}: {method}")
