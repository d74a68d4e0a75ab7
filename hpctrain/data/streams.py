"""Reads streams: the micro batches of a training, whose stream begins anew at its end, and those of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from hpctrain.base.draws import Draws, Name
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.base.json_values import decode, encode
from hpctrain.base.torch_private import hide_worker
from hpctrain.contracts.dataset import Collate, Stream
from hpctrain.contracts.model import Batch
from hpctrain.data.batches import Loaded, Place, collated, name_of_batch
from hpctrain.data.items import refuse_reused_memory, snapshot
from hpctrain.data.plan import Planned

T = TypeVar("T")

_END = object()


class Reader:
    """Reads the items of a stream, or of one of its shards, from a place on, within `held`."""

    def __init__(self, stream: Stream, seed: int, place: Place, shards: int = 1, shard: int = 0) -> None:
        """seed: of what the stream draws; each item draws by its epoch and number."""
        self._stream = stream.shard(shards, shard) if shards > 1 else stream
        self._name = f"shard {shard} of {shards} of the stream" if shards > 1 else "the stream"
        self._shard, self._place = shard, place
        self._draws = Draws(seed, self._stream) if stream.draws else None
        self._epoch, self.items = place.epoch, place.items
        self._iterator: Iterator[Any] | None = None

    def held(self) -> AbstractContextManager[None]:
        """Leave the generators that the stream draws from as they were before."""
        return nullcontext() if self._draws is None else self._draws.held()

    def called(self, name: Name, call: Callable[[], T]) -> T:
        """The result of a call of the stream's code; what it draws follows from the name."""
        return call() if self._draws is None else self._draws.seeded(name, call)

    def take(self) -> Any:
        """The next item; the first of the next epoch at the end."""
        while (item := self.take_of_epoch()) is _END:
            if self.items == 0:
                raise UsageError(f"[dataset]: {self._name} has no items; expected one at least for each reader")
            self._epoch, self.items, self._iterator = self._epoch + 1, 0, None
        return item

    def take_of_epoch(self) -> Any:
        """The next item, or _END."""
        if self._iterator is None:
            self._iterator = self._begun()
        item = self._next(self._iterator, self.items)
        self.items += item is not _END
        return item

    def place(self) -> Place:
        """The place behind the item that came last. Raises UsageError for a state that is not made of plain values."""
        state = self._stream.state()
        try:
            text = None if state is None else json.dumps(encode(state, "state_dict()"))
        except TypeError as error:
            raise UsageError(f"[dataset]: the state of the stream can't be saved: {error}") from None
        return Place(self._epoch, self.items, text)

    def _begun(self) -> Iterator[Any]:
        self.called(("epoch", self._shard, self._epoch), partial(self._stream.set_epoch, self._epoch))
        if self._draws is not None:
            self._draws.search_again()
        state, self._place = self._place.state, Place()
        if state is not None:
            self._stream.load_state(decode(json.loads(state)))
            return iter(self._stream)
        iterator = iter(self._stream)
        for number in range(self.items):
            if self._next(iterator, number) is _END:
                raise TrainingError(
                    f"[dataset]: {self._name} ended after {number} items, but the run had read {self.items}"
                )
        return iterator

    def _next(self, iterator: Iterator[Any], number: int) -> Any:
        return self.called(("stream", self._shard, self._epoch, number), partial(next, iterator, _END))


@dataclass(frozen=True)
class Reading:
    """How the readers of this rank share a stream.

    shards: 1 if each rank reads all of it. readers: the shards of this rank, by the worker that reads them. places: where each
    of them begins. position: the samples that all ranks have seen.
    """

    shards: int
    readers: list[int]
    places: Mapping[int, Place]
    position: int


class TrainedStream:
    """The training micro batches of a stream, by what is planned for them: a dataset for torch's DataLoader.

    Without shards, item i is position i of the order, and a reader skips what other ranks take.
    """

    def __init__(
        self, stream: Stream, collate: Collate, seed: int, reading: Reading, name: str = "the data set"
    ) -> None:
        """name: of the data set, for messages."""
        self._stream, self._collate, self._seed, self._reading, self._name = stream, collate, seed, reading, name
        self._has_given, self.draws, self.ends_unplanned = False, stream.draws, False
        self._position = reading.position
        self._reader: Reader | None = None
        self._shard = 0

    def __getitem__(self, planned: Planned) -> Loaded:
        if self._reader is None:
            worker = get_worker_info()
            self._shard = self._reading.readers[0 if worker is None else worker.id]
            hide_worker()
            place = self._reading.places[self._shard]
            self._reader = Reader(self._stream, self._seed, place, self._reading.shards, self._shard)
        with self._reader.held():
            return self._read(self._reader, planned)

    def _read(self, reader: Reader, planned: Planned) -> Loaded:
        sharded = self._reading.shards > 1
        if not sharded:
            self._skip_to(reader, planned.positions[0])
        items = [reader.take() for _ in planned.indices[:1]]
        before = None if self._has_given else snapshot(items)
        items += [reader.take() for _ in planned.indices[1:]]
        if not self._has_given:
            refuse_reused_memory(self._name, before, items[:1])
        self._has_given = True
        batch = _batch(reader, self._stream, self._collate, items, planned)
        self._position += len(planned.indices)
        if not sharded and planned.after is not None:
            self._skip_to(reader, planned.after)  # then all ranks have the same place
        known = sharded or planned.after is not None
        return Loaded(planned, batch, (self._shard, reader.place()) if known else None)

    def _skip_to(self, reader: Reader, position: int) -> None:
        while self._position < position:
            reader.take()
            self._position += 1


class EvaluatedStream:
    """The micro batches of an evaluation: of each block of items, this rank's. All ranks read the whole stream, so each knows
    where it ends without asking the others."""

    def __init__(self, stream: Stream, collate: Collate, seed: int) -> None:
        self._stream, self._collate, self._seed = stream, collate, seed
        self._reader: Reader | None = None
        self.draws, self.ends_unplanned = stream.draws, True

    def __getitem__(self, planned: Planned) -> Loaded | None:
        """None behind the end. A rank without an item in the last block repeats the block's first, which does not count."""
        if self._reader is None or planned.place == 0:
            self._reader = Reader(self._stream, self._seed, Place())
        with self._reader.held():
            return self._read(self._reader, planned)

    def _read(self, reader: Reader, planned: Planned) -> Loaded | None:
        first, mine = [], []
        while reader.items <= planned.indices[-1]:
            number, item = reader.items, reader.take_of_epoch()
            if item is _END:
                break
            first += [item] * (number == planned.place)
            mine += [item] * (number in planned.indices)
        if not first:
            return None
        planned = replace(planned, counts=bool(mine))
        return Loaded(planned, _batch(reader, self._stream, self._collate, mine or first, planned))


def _batch(reader: Reader, stream: Stream, collate: Collate, items: list[Any], planned: Planned) -> Batch:
    return reader.called(name_of_batch(planned), partial(collated, stream, collate, items, planned))
