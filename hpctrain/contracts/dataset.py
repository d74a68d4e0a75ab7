"""The slot `dataset`: samples by index, and a fingerprint that says which samples they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from hpctrain.base.safe_files import cache_directory
from hpctrain.contracts.plugin import Plugin

Split = Literal["train", "validation", "test"]
Lengths = np.ndarray[Any, np.dtype[np.int64]]
"""Tokens of each sample, `(samples,)`."""


Weights = np.ndarray[Any, np.dtype[np.float64]]
"""How often each sample is drawn, relative to the others, `(samples,)`."""


@dataclass(frozen=True)
class Part:
    """Consecutive samples that training draws in an order of their own. weights: of each, as `Samples.weights`."""

    count: int
    weights: Weights | None = None


@dataclass(frozen=True)
class Mixture:
    """Parts that training draws by shares.

    phases: the steps from which other shares hold, the first 0, and those of the parts; only their ratios matter.
    """

    parts: Sequence[Part]
    phases: Sequence[tuple[int, Sequence[float]]]


Collate = Callable[[list[Any]], Any]
"""Makes a batch, a dict of tensors or a list whose last is the target, of a list of samples."""


class Source(ABC):
    """The source of samples: `Samples`, which have places, or a `Stream`."""

    draws: ClassVar[bool] = False
    """Whether an item may draw random numbers (augmentation). Then generators of Python, NumPy and torch on the CPU, and those in
    its attributes, are seeded for each item: draws are the same on any number of ranks and workers, and differ between epochs.
    Without workers it is then read between two steps, not on a thread. Draws of `collation` are seeded for each micro batch, and
    depend on micro_size, too."""

    vocab_size: int | None = None
    """Ids are smaller than this; None where samples hold no ids."""

    workers: int = 0
    """Processes that load, where the job does not say."""

    is_estimate: bool = False
    """Whether the number of samples and their lengths are estimates; only where the context `may_estimate`."""

    remark: str = ""
    """A clause for the screen about the data set's own settings that are used."""

    def collation(self) -> Collate | None:
        """Makes micro batches of samples; None stacks samples of one shape (torch's default_collate).

        Batches by token budget are padded by the trainer, so `[batch] tokens` refuses a dataset that has one.
        """
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that differs when any sample would: compared across ranks and on resume. Cheap to make."""


class Samples(Source):
    """A finite list of samples; the trainer decides on order, batches and ranks."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Sample `index`: a dict of tensors (`input_ids`, `labels`: each (seq,)) or a tuple whose last is the target."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples with these indices, for data that gives several at once faster."""
        return [self[index] for index in indices]

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the training samples that are asked for next, from 0; called where it changes."""

    def lengths(self) -> Lengths | None:
        """How many tokens each sample has, without loading any; None where that is not known.

        Batches by token budget need it. The length of a sample is the first dim of its entries that the model pads.
        """
        return None

    def weights(self) -> Weights | None:
        """The weights that training draws samples by, with replacement; None takes each sample once in an epoch."""
        return None

    def mixture(self) -> Mixture | None:
        """The parts that training draws samples from, each in an order of its own; None where all are one. Excludes `weights`."""
        return None


class Stream(Source):
    """Samples one after the other. It decides on their order; the trainer decides on batches, and begins it anew at its end."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """The items of the epoch, from its beginning or from the state that was loaded just before; the same on every rank."""

    def length(self) -> int | None:
        """Items of an epoch; None where that is not known."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """The number of the epoch whose items are asked for next, from 0."""

    @property
    def shards(self) -> bool:
        """Whether the stream has a `shard`. Without, every data-parallel rank reads all items and keeps its own."""
        return False

    def shard(self, count: int, index: int) -> Stream:
        """The part of reader `index` of `count`. The parts are disjoint, and none is empty."""
        raise NotImplementedError

    def state(self) -> Any:
        """The state with which `load_state` goes on behind the item that came last, as a value for `encode_value`; None if it
        can't."""
        return None

    def load_state(self, state: Any) -> None:
        """The next iterator goes on from here."""


def _here(name: str, action: Callable[[], Any]) -> Any:
    return action()


@dataclass(frozen=True)
class DatasetContext:
    """The rest of the job, as far as a dataset needs it."""

    seq_length: int | None
    """Tokens per sample, at most: `[dataset] seq_length`, else the model's max_seq_length."""

    vocab_size: int | None
    """The model's vocabulary."""

    seed: int

    cache: Path = field(default_factory=cache_directory)
    """`[dataset] cache`: a directory for prepared data, which jobs and nodes may share (`hpctrain.toolkit.cache`)."""

    once_per_node: Callable[[str, Callable[[], Any]], Any] = _here
    """`once_per_node(name, action)`: one rank of each node runs `action`, on a thread that may use the cores of all ranks of the
    node. Its value, a small one (see `gather_values`), is returned on all ranks of the node; an exception on any node is raised on
    all ranks. All ranks must call it, however long `action` takes. A second call with this name returns the first call's value.
    """

    by_tokens: bool = False
    """Whether batches are cut by tokens, for which the samples' `lengths` are asked."""

    may_estimate: bool = False
    """Whether nobody will train on the samples (`hpctrain check`): their number may be an estimate where counting is costly."""


class Dataset(Plugin):
    """Opens the samples of a split. A dataset without such a split returns None; "test" is asked for by commands only."""

    @abstractmethod
    def open(self, split: Split, context: DatasetContext) -> Samples | Stream | None:
        """The samples of `split`; raises UsageError for a missing file or an impossible option."""


class TextDataset(Dataset):
    """A dataset whose samples are text: what a language model continues can be read (`hpctrain sample`)."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """The ids that `decode` knows are smaller than this."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, as in the samples."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; U+FFFD stands for what is no whole character."""
