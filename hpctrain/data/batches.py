"""Makes micro batches of samples, in the rank's process or in a worker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch.utils.data import default_collate

from hpctrain.conformance.data import refuse_fewer_rows, refuse_other_item
from hpctrain.contracts.dataset import Collate, Samples, Source
from hpctrain.contracts.model import Batch
from hpctrain.data.padding import Padding
from hpctrain.data.plan import Planned
from hpctrain.seeded import drawing


@dataclass(frozen=True)
class Place:
    """How far the reader of a stream is.

    items: read of the epoch. state: the stream's own at this place, as JSON; None if it has none.
    """

    epoch: int = 0
    items: int = 0
    state: str | None = None


@dataclass(frozen=True)
class Loaded:
    """A micro batch, and what was planned for it. place: the shard of a stream, and how far it is read."""

    planned: Planned
    batch: Batch
    place: tuple[int, Place] | None = None


def collated(source: Source, collate: Collate, items: list[Any], seed: int, planned: Planned) -> Batch:
    """A batch of samples. What `collate` draws follows from the first sample, so that ranks and workers don't matter."""
    first = planned.positions[0] if planned.positions else None
    with drawing(seed, "collate", first, planned.place) if source.draws else nullcontext():
        return collate(items)


class Batches:
    """The micro batches of samples, by what is planned for them: a dataset for torch's DataLoader."""

    def __init__(self, samples: Samples, collate: Collate = default_collate, seed: int = 0) -> None:
        """seed: of what samples draw."""
        self._samples, self._collate, self._seed = samples, collate, seed
        self._has_given = False

    def __getitem__(self, planned: Planned) -> Loaded:
        positions: Sequence[int | None] = planned.positions or [None] * len(planned.indices)
        items = [self._sample(int(i), position) for i, position in zip(planned.indices, positions, strict=True)]
        if not self._has_given and items:
            again = self._sample(int(planned.indices[0]), positions[0])
            refuse_other_item(self._samples, int(planned.indices[0]), items[0], again)
        batch = collated(self._samples, self._collate, items, self._seed, planned)
        if not self._has_given:
            refuse_fewer_rows(self._samples, len(items), batch)
        self._has_given = True
        if isinstance(self._collate, Padding) and not planned.counts:
            batch = self._collate.blank(batch)
        return Loaded(planned, batch)

    def _sample(self, index: int, position: int | None) -> Any:
        """position: in the order; None in an evaluation."""
        with drawing(self._seed, index, position) if self._samples.draws else nullcontext():
            return self._samples[index]
