"""Makes micro batches of samples, in the rank's process or in a worker. The first batch of each process is looked at: items have
memory of their own and follow from their index."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from hpctrain.base.errors import ContractError, TrainingError
from hpctrain.contracts.dataset import Collate, Samples, Source
from hpctrain.contracts.model import Batch
from hpctrain.data.plan import Planned
from hpctrain.data.shapes import PaddedStack, Padding

if TYPE_CHECKING:
    from hpctrain.base.draws import Draws, Name

LOG = logging.getLogger("hpctrain")

# the most samples that a sentence names
_SHOWN = 32
Drawn = tuple[int, "int | None"]
"""The index of a sample, and its position in the order; None in an evaluation. What the sample draws follows from both."""


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
    """A micro batch, and what was planned for it. place: the shard of a stream, and how far it is read. seconds: of the loading."""

    planned: Planned
    batch: Batch
    place: tuple[int, Place] | None = None
    seconds: float = 0.0


def name_of_batch(planned: Planned) -> Name:
    """The name of what a collation draws: it follows from the first sample, so that ranks and workers don't matter."""
    return "collate", planned.positions[0] if planned.positions else None, planned.place


def collated(source: Source, collate: Collate, items: list[Any], planned: Planned) -> Batch:
    """A batch of samples. Raises TrainingError where torch's default_collate can't stack them."""
    try:
        return collate(items)
    except Exception as error:
        if collate is not default_collate and not isinstance(collate, PaddedStack):
            raise  # the user's own function: its error tells more
        numbers = f" {', '.join(map(str, planned.indices[:_SHOWN]))}" if isinstance(source, Samples) else ""
        raise TrainingError(
            f"the samples{numbers} can't be made into a batch ({error}); expected samples of one form, or [dataset] collate = "
            '"package.module:function" that pads them into a batch'
        ) from error


class Batches:
    """The micro batches of samples, by what is planned for them: a dataset for torch's DataLoader."""

    ends_unplanned = False
    """Whether they may end before what is planned for them."""

    def __init__(
        self, samples: Samples, collate: Collate = default_collate, seed: int = 0, name: str = "the data set"
    ) -> None:
        """seed: of what samples draw. name: of the data set, for messages."""
        self._samples, self._collate, self._name = samples, collate, name
        self._draws: Draws | None = None
        if samples.draws:  # most draw nothing
            from hpctrain.base.draws import Draws

            self._draws = Draws(seed, samples)
        self._has_given, self._epoch, self._size = False, 0, max(1, len(samples))  # a rank's split may be empty
        self.draws = samples.draws

    def __getitem__(self, planned: Planned) -> Loaded:
        batch = self._at_once(planned) or self._collated(self._items(planned), planned)
        self._has_given = True
        if isinstance(self._collate, Padding) and not planned.counts:
            batch = self._collate.blank(batch)
        return Loaded(planned, batch)

    def _at_once(self, planned: Planned) -> Batch | None:
        """The batch without its items, where the samples can give it; not the first one, nor an epoch's."""
        ends = {position // self._size for position in (*planned.positions[:1], *planned.positions[-1:])}
        if not self._has_given or self._collate is not default_collate or ends - {self._epoch}:
            return None
        return self._samples.batch(planned.indices)

    def _collated(self, items: list[Any], planned: Planned) -> Batch:
        collate = partial(collated, self._samples, self._collate, items, planned)
        if self._draws is None or self._collate is default_collate:  # torch's own draws nothing
            return collate()
        return self._draws.of([name_of_batch(planned)], lambda *_: collate())[0]

    def _items(self, planned: Planned) -> list[Any]:
        """The samples; the first ones of this process are looked at."""
        positions: Sequence[int | None] = planned.positions or [None] * len(planned.indices)
        places = list(zip(planned.indices, positions, strict=True))
        if self._has_given or not places:
            return self._samples_at(places)
        [first] = self._samples_at(places[:1])
        before = snapshot(first)  # a data set may give one buffer again and again
        items = [first, *self._samples_at(places[1:])]
        refuse_reused_memory(self._name, before, first)
        # read again: a resume, or another layout, trains on the same samples only if they follow from their index
        refuse_other_item(self._name, places[0][0], before, self._samples_at(places[:1])[0], self.draws)
        return items

    def _samples_at(self, places: Sequence[Drawn]) -> list[Any]:
        samples = []
        for epoch, group in groupby(places, self._epoch_at):
            if epoch not in (None, self._epoch):  # a batch may hold the end of one epoch and the begin of the next
                self._begin(epoch)
            samples += self._of_epoch(list(group))
        return samples

    def _epoch_at(self, place: Drawn) -> int | None:
        return None if place[1] is None else place[1] // self._size

    def _begin(self, epoch: int) -> None:
        self._epoch = epoch
        if self._draws is None:
            self._samples.set_epoch(epoch)
            return
        with self._draws.held():
            self._draws.seeded(("epoch", epoch), partial(self._samples.set_epoch, epoch))
        self._draws.search_again()  # set_epoch may have made new generators

    def _of_epoch(self, places: Sequence[Drawn]) -> list[Any]:
        together = partial(self._samples.__getitems__, [index for index, _ in places])
        if self._draws is None:
            return together()
        return self._draws.of(places, lambda index, _: self._samples[index], together)


def snapshot(item: Any) -> object:
    """The tensors, arrays, numbers and texts of an item as they are now, to compare with. Objects of other types are all alike."""
    if isinstance(item, Mapping):
        return type(item), [(key, snapshot(value)) for key, value in item.items()]
    if isinstance(item, (list, tuple)):
        return type(item), [snapshot(value) for value in item]
    if isinstance(item, Tensor):
        return _bits(item)
    if isinstance(item, np.ndarray) and item.dtype != object:
        return item.dtype, item.shape, item.tobytes()
    return type(item), repr(item) if isinstance(item, (int, float, str, bytes)) else None


def refuse_other_item(name: str, index: int, before: object, again: Any, draws: bool) -> None:
    """Refuse an item `index` that, read again, is not as in the snapshot `before`. name: of the data set. draws: whether its items
    may draw random numbers, which are seeded: then it is only told.

    Raises ContractError.
    """
    if snapshot(again) == before:
        return
    if draws:
        LOG.warning(
            "%s gave another item %d when it was read again, although Python's, NumPy's and torch's generators and those that it "
            "keeps are seeded: this run can't be repeated, and ranks and resumes draw differently; in an item, seed a generator by "
            "the index, as numpy.random.default_rng(index)", name, index,
        )  # fmt: skip
        return
    raise ContractError(
        f"{name} gave another item {index} when it was read again, expected items that follow from their index; a data set whose "
        "items draw random numbers says so with `draws = True`"
    )


def refuse_reused_memory(name: str, before: object, item: Any) -> None:
    """Raises ContractError if an item is not as in the snapshot `before` once the next ones were read."""
    if snapshot(item) != before:
        raise ContractError(
            f"{name} gave an item whose values change when the next one is read, expected memory of its own for each item: a "
            "micro batch would be one item, repeated; return a copy (`.clone()`, `.copy()`)"
        )


def _bits(tensor: Tensor) -> object:
    """The form and the bytes of a tensor; None for one that has no plain memory."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return None
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)  # both may be mere flags
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes()
