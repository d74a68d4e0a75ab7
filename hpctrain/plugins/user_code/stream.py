"""Any iterable data set: an object with __iter__ and without __getitem__, or torch's IterableDataset."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

from hpctrain.base.draws import Draws
from hpctrain.base.errors import UsageError
from hpctrain.contracts.dataset import Collate, Stream
from hpctrain.plugins.user_code.calling import users_code
from hpctrain.plugins.user_code.samples import UserCollation, collation_of, saved

_PROBES = 4
"""Items in the fingerprint of a stream without its own fingerprint()."""
_END = object()


class UserStream(Stream):
    """`set_epoch(epoch)`, `shard(num_shards, index)`, `state_dict()` and `load_state_dict(state)` are called if they are there."""

    draws: ClassVar[bool] = True

    def __init__(self, reference: str, source: Iterable[Any], collation: UserCollation | None) -> None:
        self._reference, self._source, self._collation = reference, source, collation
        self._epoch = 0
        self._is_left = False
        """Whether the newest iteration was left early. Then an object with a state would go on there: it gets the first one."""
        self._fresh = copy.deepcopy(self.state())

    def _renew(self) -> None:
        if self._is_left and self._fresh is not None:
            self.load_state(copy.deepcopy(self._fresh))
            self.set_epoch(self._epoch)
        self._is_left = False

    def __iter__(self) -> Iterator[Any]:
        self._renew()
        self._is_left = True
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
            return len(self._source)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # none, or one that only some kinds of the class have
            return None

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        if hasattr(self._source, "set_epoch"):
            with self._calling(f"set_epoch({epoch})"):
                self._source.set_epoch(epoch)

    @property
    def shards(self) -> bool:
        return callable(getattr(self._source, "shard", None))

    def shard(self, count: int, index: int) -> Stream:
        source: Any = self._source
        self._renew()
        with self._calling(f"shard(num_shards={count}, index={index})"):
            part = source.shard(num_shards=count, index=index)
        return UserStream(self._reference, part, self._collation)

    def state(self) -> Any:
        source: Any = self._source
        if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
            return None
        with self._calling("state_dict()"):
            return source.state_dict()

    def load_state(self, state: Any) -> None:
        source: Any = self._source
        with self._calling("load_state_dict(...)"):
            source.load_state_dict(state)
        self._is_left = False

    def collation(self) -> Collate | None:
        return self._collation or collation_of(self._reference, self._source)

    def fingerprint(self) -> str:
        """The data set's own `fingerprint()` if it has one, else a hash of its length and its first items."""
        source: Any = self._source
        has_state = self._fresh is not None
        if hasattr(source, "fingerprint") and not has_state:
            with self._calling("fingerprint()"):
                return str(source.fingerprint())
        one, other = self._first(), self._first(resumes=has_state)
        if one != other and has_state and one == self._first():
            raise UsageError(
                f"[dataset] name = {self._reference!r}: after load_state_dict(state_dict()) its iterator goes on with other items, "
                "as it would after a resume; expected those that follow: count an item before its `yield`, not behind it"
            )
        if hasattr(source, "fingerprint"):
            with self._calling("fingerprint()"):
                return str(source.fingerprint())
        if one != other:
            raise UsageError(
                f"[dataset] name = {self._reference!r}: it gives other items each time, although the draws of Python, NumPy and "
                "torch are seeded; seed its own generators (set_epoch is called with the epoch), or give it a method fingerprint()"
            )
        return hashlib.blake2b(f"{self._reference} stream {self.length()} {one}".encode(), digest_size=16).hexdigest()

    def _first(self, resumes: bool = False) -> list[str]:
        """Digests of the first items. resumes: whether the second half is read as after a resume."""
        draws, found, state = Draws(0, self._source), list[str](), None
        with draws.held():
            for half in range(2):
                if resumes or half == 0:
                    draws.seeded(("epoch", 0), partial(self.set_epoch, 0))
                    if half:
                        self.load_state(state)
                    items = iter(self)
                for number in range(half * _PROBES // 2, (half + 1) * _PROBES // 2):
                    item = draws.seeded(("fingerprint", number), partial(next, items, _END))
                    if item is _END:
                        return found
                    what = f"[dataset] name = {self._reference!r}"
                    found.append(hashlib.blake2b(saved(what, item, number)).hexdigest())
                state = copy.deepcopy(self.state()) if resumes else None
        return found

    def _calling(self, method: str) -> AbstractContextManager[None]:
        return users_code(f"[dataset] name = {self._reference!r}: {method}")
