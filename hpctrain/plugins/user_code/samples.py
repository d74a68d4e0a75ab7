"""Any map-style data set: an object with __len__ and __getitem__; its weights, and the function that makes a batch of samples."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from hpctrain.base.draws import Draws
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.contracts.dataset import Collate, Lengths, Samples, Weights
from hpctrain.plugins.user_code.calling import users_code
from hpctrain.plugins.user_code.reference import resolve_for

_PROBES = 16
"""About how many samples go into the fingerprint of a dataset without its own fingerprint()."""


@dataclass(frozen=True)
class Weighing:
    """Calls function(dataset) with the object that the dataset's callable returned."""

    what: str
    function: Callable[[Any], Any]

    @classmethod
    def from_reference(cls, reference: str) -> Weighing:
        """Raises UsageError for what cannot be called with a data set."""
        what = f"[dataset] weights = {reference!r}"
        return cls(what, resolve_for(what, reference, "the data set"))

    def __call__(self, source: Any) -> Weights:
        with users_code(self.what):
            found = self.function(source)
        return as_weights(self.what, found)


def as_weights(what: str, found: Any) -> Weights:
    """Numbers as an array; UsageError that begins with `what` for anything else."""
    try:
        if isinstance(found, (np.ndarray, Tensor, list, tuple)):  # numpy would read through a data set, too
            return np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError(f"{what}: found {type(found).__name__}, expected numbers, one for each sample")


@dataclass(frozen=True)
class UserCollation:
    """Calls function(samples) and checks the batch. what: the subject of an error's sentence."""

    what: str
    function: Callable[[list[Any]], Any]

    @classmethod
    def from_reference(cls, reference: str) -> UserCollation:
        """Raises UsageError for what cannot be called with a list of samples."""
        what = f"[dataset] collate = {reference!r}"
        return cls(what, resolve_for(what, reference, "a list of samples"))

    def __call__(self, samples: list[Any]) -> Any:
        """The batch: a dict with `labels`, or a list whose last is the target, (samples, ...)."""
        with users_code(self.what):
            batch = self.function(samples)
        if isinstance(batch, Mapping):
            batch = dict(batch)
        elif not isinstance(batch, (list, tuple)):
            raise TrainingError(
                f"{self.what} returned {type(batch).__name__}, expected a dict of tensors with labels, or a list or tuple of "
                "tensors whose last is the target"
            )
        if not batch:
            raise TrainingError(f"{self.what} returned an empty {type(batch).__name__} for {len(samples)} samples")
        target = batch.get("labels") if isinstance(batch, dict) else batch[-1]
        if isinstance(target, Tensor) and (target.dim() == 0 or len(target) != len(samples)):
            raise TrainingError(
                f"{self.what} returned a target of shape {tuple(target.shape)} for {len(samples)} samples; expected a row for "
                f"each, ({len(samples)}, ...)"
            )
        return batch


def collation_of(reference: str, source: Any) -> UserCollation | None:
    """The `collate_fn` of a data set, if it has one."""
    own = getattr(source, "collate_fn", None)
    return None if own is None else UserCollation(f"[dataset] name = {reference!r}: its collate_fn", own)


class UserSamples(Samples):
    """`set_epoch(epoch)`, `lengths()`, `sample_weights`, `collate_fn` and `fingerprint()` are used if they are there."""

    draws: ClassVar[bool] = True

    def __init__(self, reference: str, source: Any, collation: UserCollation | None, weigh: Weighing | None) -> None:
        self._reference, self._source, self._collation, self._weigh = reference, source, collation, weigh

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weigh": None}  # a worker asks for samples only

    def __len__(self) -> int:
        with self._calling("__len__()"):
            return len(self._source)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._source[index]
        except BaseException:
            with self._calling(f"__getitem__({index})"):
                raise

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        if not hasattr(self._source, "__getitems__"):
            return super().__getitems__(indices)
        try:
            items = list(self._source.__getitems__(list(indices)))
        except Exception:
            for index in indices:  # the error of one of them has its number
                self[index]
            with self._calling("__getitems__()"):
                raise
        if len(items) != len(indices):
            raise TrainingError(
                f"[dataset] name = {self._reference!r}: __getitems__() returned {len(items)} items, expected one for each of "
                f"{len(indices)} indices"
            )
        return items

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._source, "set_epoch"):
            with self._calling(f"set_epoch({epoch})"):
                self._source.set_epoch(epoch)

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
        probed = range(0, len(self), max(1, len(self) // _PROBES))
        names = [("fingerprint", index) for index in probed for _ in range(2)]
        texts = iter(Draws(0, self._source).of(names, self._saved))
        for one, other in zip(texts, texts, strict=True):
            digest.update(one if one == other else b"differs")
        return digest.hexdigest()

    def _saved(self, _: str, index: int) -> bytes:
        return saved(f"[dataset] name = {self._reference!r}", self[index], index)

    def _calling(self, method: str) -> AbstractContextManager[None]:
        return users_code(f"[dataset] name = {self._reference!r}: {method}")


def saved(what: str, sample: Any, index: int) -> bytes:
    """A sample as bytes, for a fingerprint."""
    buffer = io.BytesIO()
    with users_code(f"{what}: pickling sample {index}, for lack of a fingerprint(),"):
        torch.save(sample, buffer)
    return buffer.getvalue()
