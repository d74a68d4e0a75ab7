"""The places of a stream's readers: shared out over ranks and workers, saved, and restored on other ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from hpctrain.base.errors import CheckpointError
from hpctrain.base.json_values import decode
from hpctrain.contracts.dataset import Stream
from hpctrain.data.batches import Place
from hpctrain.data.streams import Reading
from hpctrain.ranks.json_collectives import gather_values


class StreamPlaces:
    """The places of this data-parallel rank's readers.

    A stream with shards has one for each worker of each rank. Any other stream is read whole by one reader of each rank, whose
    place is the same on all ranks.
    """

    def __init__(self, stream: Stream, rank: int, ranks: int, workers: int) -> None:
        self.workers = workers if stream.shards else min(workers, 1)
        """Worker processes of this rank."""
        readers = max(1, self.workers)
        self.shards = ranks * readers if stream.shards else 1
        first = rank * readers if self.shards > 1 else 0
        self._mine = list(range(first, first + readers)) if self.shards > 1 else [0]
        self._places: Mapping[int, Place] = {}

    def reading(self, samples_seen: int, micro_batches: int) -> Reading:
        """The position with which the readers begin. micro_batches: the number that this rank has trained on."""
        turn = micro_batches % len(self._mine)  # the reader whose micro batch is next
        places = {shard: self._place(shard) for shard in self._mine}
        return Reading(self.shards, self._mine[turn:] + self._mine[:turn], places, samples_seen)

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

    def restore(self, values: Mapping[str, Any]) -> str:
        """Continue from a checkpoint; return a sentence about how. Raises CheckpointError for values that can't be."""
        places = [Place(**place) for place in values["places"]]
        try:
            for place in places:
                decode(json.loads(place.state or "null"))
        except ValueError as error:
            raise CheckpointError(f"the saved state of the stream can't be read: {error}") from None
        if values["shards"] == self.shards:
            self._places = dict(enumerate(places))
            mine = [places[shard] for shard in self._mine]
            if all(place.state is not None for place in mine):
                return "the stream goes on from its saved state"
            items = max(place.items for place in mine)
            return f"skipping {items:,} items of the stream, read in epoch {self.epoch} before" if items else ""
        epoch = min(place.epoch for place in places)
        items = sum(place.items for place in places if place.epoch == epoch) // self.shards
        self._places = dict.fromkeys(self._mine, Place(epoch, items))
        return (
            f"the stream was read in {values['shards']} shard{'s' * (values['shards'] > 1)} and is read in {self.shards} now: some "
            f"of its items come again in epoch {epoch}, others are left out (skipping {items:,} in each shard)"
        )
