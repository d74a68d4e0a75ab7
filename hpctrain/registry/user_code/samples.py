"""Any data set of the user's, map-style (`__len__` and `__getitem__`) or iterable (`__iter__`), and the function that turns samples
into a batch."""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from hpctrain.base.draws import Draws
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.contracts.dataset import Collate, Lengths, Samples, Source, Stream, Weights
from hpctrain.contracts.model import Batch
from hpctrain.registry.blame import users_code
from hpctrain.registry.user_code.reference import resolve_for

# samples in the fingerprint of a dataset without its own fingerprint(), about
_PROBED_SAMPLES = 16
# items in the fingerprint of a stream without its own fingerprint(): each start reads them
_PROBED_ITEMS = 4
_END = object()  # no item is this one; a stream may yield None


@dataclass(frozen=True)
class UserCollation:
    """Calls function(samples) and checks the batch. what: the subject of an error's sentence."""

    what: str
    function: Callable[[list[Any]], Any]

    @classmethod
    def from_reference(cls, reference: str) -> UserCollation:
        """Raise UsageError for what cannot be called with a list of samples."""
        what = f"[dataset] collate = {reference!r}"
        return cls(what, resolve_for(what, reference, "a list of samples"))

    def __call__(self, samples: list[Any]) -> Any:
        """The batch: a dict with `labels`, or a list whose last entry is the target, (samples, ...)."""
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


class _UserSource(Source):
    """The common part of samples and streams: `set_epoch(epoch)` and `collate_fn` are used if the data set has them."""

    draws: ClassVar[bool] = True  # nobody knows whether the user's code draws random numbers

    def __init__(self, reference: str, source: Any, collation: UserCollation | None) -> None:
        self._reference, self._source, self._collation = reference, source, collation
        self._what = f"[dataset] name = {reference!r}"

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._source, "set_epoch"):
            with self._calling(f"set_epoch({epoch})"):
                self._source.set_epoch(epoch)

    def collation(self) -> Collate | None:
        own = getattr(self._source, "collate_fn", None)
        return self._collation or (None if own is None else UserCollation(f"{self._what}: its collate_fn", own))

    def _own_fingerprint(self) -> str:
        with self._calling("fingerprint()"):
            return str(self._source.fingerprint())

    def _saved(self, sample: Any, index: int) -> bytes:
        """A sample as bytes, for a fingerprint."""
        buffer = io.BytesIO()
        with users_code(f"{self._what}: pickling sample {index}, for lack of a fingerprint(),"):
            torch.save(sample, buffer)
        return buffer.getvalue()

    def _calling(self, method: str) -> AbstractContextManager[None]:
        return users_code(f"{self._what}: {method}")


class UserSamples(_UserSource, Samples):
    """`lengths()`, `sample_weights` and `fingerprint()` are used, too."""

    def __init__(
        self,
        reference: str,
        source: Any,
        collation: UserCollation | None,
        weigh: Callable[[Any], Weights] | None,
    ) -> None:
        super().__init__(reference, source, collation)
        self._weigh = weigh

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_weigh": None}  # a worker asks for samples only

    def __len__(self) -> int:
        with self._calling("__len__()"):
            return len(self._source)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._source[index]
        except BaseException:  # the context only then: this is called for every sample
            with self._calling(f"__getitem__({index})"):
                raise

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        source = self._source
        try:
            if not hasattr(source, "__getitems__"):
                return [source[index] for index in indices]
            items = list(source.__getitems__(list(indices)))
        except Exception:
            for index in indices:  # the error of one of them has its number
                self[index]
            with self._calling("__getitems__()"):
                raise
        if len(items) != len(indices):
            raise TrainingError(
                f"{self._what}: __getitems__() returned {len(items)} items, expected one for each of {len(indices)} indices"
            )
        return items

    def batch(self, indices: Sequence[int]) -> Batch | None:
        return _of_tensors(self._source, indices)

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
            weights = own() if callable(own) else own
        return _as_weights(f"{self._what}: sample_weights", weights)

    def fingerprint(self) -> str:
        """The dataset's own `fingerprint()` if it has one, else a hash of its length and a few samples.

        A sample that differs each time, although all draws are seeded, is left out.
        """
        if hasattr(self._source, "fingerprint"):
            return self._own_fingerprint()
        digest = hashlib.blake2b(f"{self._reference} {len(self)}".encode(), digest_size=16)
        probed = range(0, len(self), max(1, len(self) // _PROBED_SAMPLES))
        names = [("fingerprint", index) for index in probed for _ in range(2)]
        texts = iter(Draws(0, self._source).of(names, lambda _, index: self._saved(self[index], index)))
        for first, second in zip(texts, texts, strict=True):  # one iterator, so these are pairs: each is read twice
            digest.update(first if first == second else b"differs")
        return digest.hexdigest()


def _of_tensors(source: Any, indices: Sequence[int]) -> list[Tensor] | None:
    """A batch of a TensorDataset, or of a Subset of one: several times faster than by items."""
    if type(source) is Subset:
        return _of_tensors(source.dataset, [source.indices[index] for index in indices])
    if type(source) is not TensorDataset:
        return None
    at = torch.tensor(indices)
    return [tensor[at] for tensor in source.tensors]


def weigh_by(reference: str) -> Callable[[Any], Weights]:
    """A function that gives the weights of a data set's samples by calling `reference`. Raises UsageError if that can't be called
    with a data set."""
    what = f"[dataset] weights = {reference!r}"
    function = resolve_for(what, reference, "the data set")

    def weigh(source: Any) -> Weights:
        with users_code(what):
            weights = function(source)
        return _as_weights(what, weights)

    return weigh


def _as_weights(what: str, weights: Any) -> Weights:
    """Numbers as an array; UsageError that begins with `what` for anything else."""
    try:
        if isinstance(weights, (np.ndarray, Tensor, list, tuple)):  # numpy would read through a data set, too
            return np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError(f"{what}: found {type(weights).__name__}, expected numbers, one for each sample")


class UserStream(_UserSource, Stream):
    """`shard(num_shards, index)`, `state_dict()`, `load_state_dict(state)` and `fingerprint()` are called, too."""

    def __init__(self, reference: str, source: Iterable[Any], collation: UserCollation | None) -> None:
        super().__init__(reference, source, collation)
        self._epoch = 0
        # whether the newest iteration was left early. Then an object with a state would go on there: it gets the first one.
        self._is_left = False
        self._fresh = copy.deepcopy(self.state())  # the object may change its state dict in place

    def _renew(self) -> None:
        """Take the data set back to its first item."""
        if self._is_left and self._fresh is not None:
            self.load_state(copy.deepcopy(self._fresh))
            self.set_epoch(self._epoch)  # the first state may hold another one
        self._is_left = False

    def __iter__(self) -> Iterator[Any]:
        self._renew()
        self._is_left = True  # until its end is reached
        with self._calling("__iter__()"):
            iterator, number = iter(self._source), 0
        while True:
            with self._calling(f"item {number} of its iterator"):
                item = next(iterator, _END)
            if item is _END:
                self._is_left = False
                return
            yield item
            number += 1

    def length(self) -> int | None:
        try:
            return len(self._source)
        except (TypeError, NotImplementedError):  # none, or one that only some kinds of the class have
            return None

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        super().set_epoch(epoch)

    @property
    def shards(self) -> bool:
        return callable(getattr(self._source, "shard", None))

    def shard(self, count: int, index: int) -> Stream:
        self._renew()
        with self._calling(f"shard(num_shards={count}, index={index})"):
            part = self._source.shard(num_shards=count, index=index)
        return UserStream(self._reference, part, self._collation)

    def state(self) -> Any:
        if not (hasattr(self._source, "state_dict") and hasattr(self._source, "load_state_dict")):
            return None
        with self._calling("state_dict()"):
            return self._source.state_dict()

    def load_state(self, state: Any) -> None:
        with self._calling("load_state_dict(...)"):
            self._source.load_state_dict(state)
        self._is_left = False

    def fingerprint(self) -> str:
        """The data set's own `fingerprint()` if it has one, else a hash of its length and its first items."""
        has_own, has_state = hasattr(self._source, "fingerprint"), self._fresh is not None
        if has_own and not has_state:
            return self._own_fingerprint()
        first, second = self._first(), self._first(resumes=has_state)
        if first != second and has_state and first == self._first():  # the draws are not the cause
            raise UsageError(
                f"{self._what}: after load_state_dict(state_dict()) its iterator goes on with other items, as it would after a "
                "resume; expected those that follow: count an item before its `yield`, not behind it"
            )
        if has_own:
            return self._own_fingerprint()
        if first != second:
            raise UsageError(
                f"{self._what}: it gives other items each time, although the draws of Python, NumPy and torch are seeded; seed its "
                "own generators (set_epoch is called with the epoch), or give it a method fingerprint()"
            )
        text = f"{self._reference} stream {self.length()} {first}"
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _first(self, resumes: bool = False) -> list[str]:
        """Digests of the first items. resumes: whether the second half is read as after a resume."""
        draws, digests, state = Draws(0, self._source), list[str](), None
        with draws.held():
            for half in range(2):
                if resumes or half == 0:
                    draws.seeded(("epoch", 0), partial(self.set_epoch, 0))
                    if half:
                        self.load_state(state)
                    items = iter(self)
                for number in range(half * _PROBED_ITEMS // 2, (half + 1) * _PROBED_ITEMS // 2):
                    item = draws.seeded(("fingerprint", number), partial(next, items, _END))
                    if item is _END:
                        return digests
                    digests.append(hashlib.blake2b(self._saved(item, number)).hexdigest())
                state = copy.deepcopy(self.state()) if resumes else None
        return digests
