"""Any map-style data set: an object with __len__ and __getitem__."""

from __future__ import annotations

import hashlib
import io
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np
import torch

from hpctrain.base.seeded import drawing
from hpctrain.contracts.dataset import Collate, Lengths, Samples, Weights
from hpctrain.plugins.user_code.calling import users_code
from hpctrain.plugins.user_code.collate import ForeignCollation, collation_of
from hpctrain.plugins.user_code.weights import Weighing, as_weights

_PROBES = 16
"""About how many samples go into the fingerprint of a dataset without its own fingerprint()."""


class ForeignSamples(Samples):
    """`lengths()`, `sample_weights`, `collate_fn` and `fingerprint()` are used if they are there."""

    draws: ClassVar[bool] = True

    def __init__(self, reference: str, source: Any, collation: ForeignCollation | None, weigh: Weighing | None) -> None:
        self._reference, self._source, self._collation, self._weigh = reference, source, collation, weigh

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weigh": None}  # a worker asks for samples only

    def __len__(self) -> int:
        with self._calling("__len__()"):
            return len(self._source)

    def __getitem__(self, index: int) -> Any:
        with self._calling(f"__getitem__({index})"):
            return self._source[index]

    def lengths(self) -> Lengths | None:
        """The dataset's own `lengths()` if it has one, else None."""
        if not hasattr(self._source, "lengths"):
            return None
        with self._calling("lengths()"):
            return np.asarray(self._source.lengths(), dtype=np.int64)

    def weights(self) -> Weights | None:
        """The job's weights, else the dataset's own `sample_weights`: an array, or a method that returns one."""
        if self._weigh is not None:
            return self._weigh(self._source)
        own = getattr(self._source, "sample_weights", None)
        if own is None:
            return None
        with self._calling("sample_weights"):
            found = own() if callable(own) else own
        return as_weights(f"[dataset] name = {self._reference!r}: sample_weights", found)

    def collation(self) -> Collate | None:
        return self._collation or collation_of(self._reference, self._source)

    def fingerprint(self) -> str:
        """The dataset's own `fingerprint()` if it has one, else a hash of its length and a few samples.

        A sample that is another one each time, although all draws are seeded, is left out.
        """
        if hasattr(self._source, "fingerprint"):
            with self._calling("fingerprint()"):
                return str(self._source.fingerprint())
        digest = hashlib.blake2b(f"{self._reference} {len(self)}".encode(), digest_size=16)
        step = max(1, len(self) // _PROBES)
        for index in range(0, len(self), step):
            one, other = self._saved(index), self._saved(index)
            digest.update(one if one == other else b"differs")
        return digest.hexdigest()

    def _saved(self, index: int) -> bytes:
        with drawing("fingerprint", index):
            sample = self[index]
        return saved(f"[dataset] name = {self._reference!r}", sample, index)

    def _calling(self, method: str) -> AbstractContextManager[None]:
        return users_code(f"[dataset] name = {self._reference!r}: {method}")


def saved(what: str, sample: Any, index: int) -> bytes:
    """A sample as bytes, for a fingerprint."""
    buffer = io.BytesIO()
    with users_code(f"{what}: pickling sample {index}, for lack of a fingerprint(),"):
        torch.save(sample, buffer)
    return buffer.getvalue()
