"""The rows of a data set as samples by number, or one after the other. Rows are encoded where they are loaded: in a worker."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from datasets import Dataset, IterableDataset

from hpctrain.api import Lengths, Samples, Stream
from hpctrain_huggingface.dataset.encoding import Encoder

_LOOKS = 16
"""Rows that a fingerprint looks at."""


class Rows(Samples):
    """A data set in memory or on a mapped file."""

    def __init__(self, rows: Dataset, encoder: Encoder, identity: str, lengths: Lengths | None = None) -> None:
        self._rows, self._encoder, self._identity, self._lengths = rows, encoder, identity, lengths
        self.vocab_size = None if encoder.tokenizer is None else len(encoder.tokenizer)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._encoder.sample(self._rows[index])

    def lengths(self) -> Lengths | None:
        return self._lengths

    def fingerprint(self) -> str:
        count = len(self._rows)
        places = sorted({count * look // _LOOKS for look in range(_LOOKS)} | {count - 1}) if count else []
        found = sha256(f"{self._identity} {count} {self._rows.column_names}".encode())
        for place in places:
            found.update(repr(self._rows[place]).encode())
        return found.hexdigest()[:32]


class RowStream(Stream):
    """A data set that is read one row after the other."""

    def __init__(self, rows: IterableDataset, encoder: Encoder, identity: str, every: int = 1, first: int = 0) -> None:
        """every, first: the rows that it keeps, where the data set has fewer shards than there are readers."""
        self._rows, self._encoder, self._identity = rows, encoder, identity
        self._every, self._first, self._read = every, first, 0
        self.vocab_size = None if encoder.tokenizer is None else len(encoder.tokenizer)

    def __iter__(self) -> Iterator[Any]:
        for row in self._rows:
            mine = self._read % self._every == self._first
            self._read += 1
            if mine:
                yield self._encoder.sample(row)
        self._read = 0

    def set_epoch(self, epoch: int) -> None:
        self._rows.set_epoch(epoch)
        self._read = 0

    @property
    def shards(self) -> bool:
        return True

    def shard(self, count: int, index: int) -> Stream:
        if self._rows.num_shards >= count:
            return RowStream(self._rows.shard(num_shards=count, index=index), self._encoder, self._identity)
        return RowStream(self._rows, self._encoder, self._identity, count, index)

    def state(self) -> Any:
        return {"rows": self._rows.state_dict(), "read": self._read}

    def load_state(self, state: Any) -> None:
        self._rows.load_state_dict(state["rows"])
        self._read = int(state["read"])

    def fingerprint(self) -> str:
        found = sha256(f"{self._identity} stream {self._rows.num_shards}".encode())
        for row, _ in zip(self._rows, range(_LOOKS), strict=False):
            found.update(repr(row).encode())
        return found.hexdigest()[:32]
