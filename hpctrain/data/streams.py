"""Reads streams: the micro batches of a training, whose stream begins anew at its end, and those of an evaluation; and the places
of its readers, which are shared out over ranks and workers, saved, and restored on other ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import get_worker_info

from hpctrain.base.draws import Draws, Name
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.base.json_values import decode, encode
from hpctrain.base.torch_private import hide_worker
from hpctrain.contracts.dataset import Collate, Stream
from hpctrain.contracts.model import Batch
from hpctrain.data.batches import Loaded, Place, collated, name_of_batch, refuse_reused_memory, snapshot
from hpctrain.data.plan import Planned
from hpctrain.ranks.json_collectives import gather_values

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
        self.items += item is not _END  # numbers of an epoch's items seed their draws
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
        state, self._place = self._place.state, Place()  # the next epoch begins at its first item
        if state is not None:
            self._stream.load_state(decode(json.loads(state)))
            return iter(self._stream)
        iterator = iter(self._stream)
        for number in range(self.items):  # without a state, what was read is read again
            if self._next(iterator, number) is _END:
                raise TrainingError(
                    f"[dataset]: {self._name} ended after {number} items, but the run had read {self.items}"
                )
        return iterator

    def _next(self, iterator: Iterator[Any], number: int) -> Any:
        return self.called(("stream", self._shard, self._epoch, number), partial(next, iterator, _END))


class TrainedStream:
    """The training micro batches of a stream, by what is planned for them: a dataset for torch's DataLoader.

    Without shards, item i is position i of the order, and a reader skips what other ranks take.
    """

    def __init__(
        self,
        stream: Stream,
        collate: Collate,
        seed: int,
        name: str,
        shards: int,
        places: Sequence[tuple[int, Place]],
        position: int,
    ) -> None:
        """name: of the data set, for messages. shards: 1 if each rank reads all of it. places: the shards of this rank, by the
        worker that reads them, and where each of them begins. position: the samples that all ranks have seen."""
        self._stream, self._collate, self._seed, self._name = stream, collate, seed, name
        self._shards, self._places, self._position = shards, places, position
        self._has_given, self.draws, self.ends_unplanned = False, stream.draws, False
        self._reader: Reader | None = None
        self._shard = 0

    def __getitem__(self, planned: Planned) -> Loaded:
        if self._reader is None:
            worker = get_worker_info()
            self._shard, place = self._places[0 if worker is None else worker.id]
            hide_worker()  # else a stream that shards by worker would shard twice
            self._reader = Reader(self._stream, self._seed, place, self._shards, self._shard)
        with self._reader.held():
            return self._read(self._reader, planned)

    def _read(self, reader: Reader, planned: Planned) -> Loaded:
        sharded = self._shards > 1
        if not sharded:
            self._skip_to(reader, planned.positions[0])
        items = [reader.take() for _ in planned.indices[:1]]
        before = None if self._has_given else snapshot(items)
        items += [reader.take() for _ in planned.indices[1:]]
        if not self._has_given:
            refuse_reused_memory(self._name, before, items[:1])
        self._has_given = True
        batch = _batch(reader, self._stream, self._collate, items, planned)
        self._position += len(planned.indices)  # other ranks' items are skipped by it
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
            first += [item] * (number == planned.place)  # for a rank without one: a forward may communicate
            mine += [item] * (number in planned.indices)
        if not first:
            return None
        planned = replace(planned, counts=bool(mine))
        return Loaded(planned, _batch(reader, self._stream, self._collate, mine or first, planned))


def _batch(reader: Reader, stream: Stream, collate: Collate, items: list[Any], planned: Planned) -> Batch:
    return reader.called(name_of_batch(planned), partial(collated, stream, collate, items, planned))


class StreamPlaces:
    """The places of this data-parallel rank's readers.

    A stream with shards has one for each worker of each rank. Any other stream is read whole by one reader of each rank, whose
    place is the same on all ranks.
    """

    def __init__(self, stream: Stream, rank: int, ranks: int, workers: int) -> None:
        self._stream = stream
        self.workers = workers if stream.shards else min(workers, 1)
        """Worker processes of this rank."""
        readers = max(1, self.workers)
        self.shards = ranks * readers if stream.shards else 1
        first = rank * readers if self.shards > 1 else 0
        self._mine = list(range(first, first + readers)) if self.shards > 1 else [0]
        self._places: Mapping[int, Place] = {}

    def batches(self, collate: Collate, seed: int, name: str, samples_seen: int, micro_batches: int) -> TrainedStream:
        """The micro batches from these places on. name: of the data set. micro_batches: those that this rank has trained on."""
        turn = micro_batches % len(self._mine)  # the reader whose micro batch is next
        places = [(shard, self._place(shard)) for shard in self._mine[turn:] + self._mine[:turn]]
        return TrainedStream(self._stream, collate, seed, name, self.shards, places, samples_seen)

    def _place(self, shard: int) -> Place:
        return self._places.get(shard, Place())

    def update(self, places: Mapping[int, Place]) -> None:
        """Take over the places after a step."""
        self._places = {**self._places, **places}

    @property
    def epoch(self) -> int:
        """The passes that all readers of this rank have completed."""
        return min(self._place(shard).epoch for shard in self._mine)

    def values(self) -> dict[str, Any]:
        """The places for a checkpoint. Collective over the world."""
        places = {shard: asdict(self._place(shard)) for shard in self._mine}
        if self.shards > 1:
            everyone: list[dict[int, Any]] = gather_values(places)
            places = {shard: place for one in everyone for shard, place in one.items()}
        return {"shards": self.shards, "places": [places[shard] for shard in sorted(places)]}

    def restore(self, shards: int, places: Sequence[Place]) -> str:
        """Continue from a checkpoint; return a sentence about how."""
        if shards == self.shards:
            self._places = dict(enumerate(places))
            mine = [places[shard] for shard in self._mine]
            if all(place.state is not None for place in mine):
                return "the stream goes on from its saved state"
            items = max(place.items for place in mine)
            return f"skipping {items:,} items of the stream, read in epoch {self.epoch} before" if items else ""
        epoch = min(place.epoch for place in places)
        items = sum(place.items for place in places if place.epoch == epoch) // self.shards  # as if read evenly
        self._places = dict.fromkeys(self._mine, Place(epoch, items))
        return (
            f"the stream was read in {shards} shard{'s' * (shards > 1)} and is read in {self.shards} now: some "
            f"of its items come again in epoch {epoch}, others are left out (skipping {items:,} in each shard)"
        )
