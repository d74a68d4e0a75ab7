"""The slot `dataset`: samples by index, and a fingerprint of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from hpctrain.base.safe_files import cache_directory
from hpctrain.contracts.model import Batch
from hpctrain.contracts.plugin import Plugin

Split = Literal["train", "validation", "test"]
Lengths = np.ndarray[Any, np.dtype[np.int64]]
"""The number of tokens of each sample, `(samples,)`."""
Weights = np.ndarray[Any, np.dtype[np.float64]]
"""The frequency with which each sample is drawn, relative to the others, `(samples,)`."""


@dataclass(frozen=True)
class Part:
    """Consecutive samples that training draws in an order of their own. weights: like those of `Samples.weights`."""

    count: int
    weights: Weights | None = None


@dataclass(frozen=True)
class Mixture:
    """Parts that training draws by shares.

    phases: the steps from which new shares hold, the first 0, each with a share per part; only their ratios matter.
    """

    parts: Sequence[Part]
    phases: Sequence[tuple[int, Sequence[float]]]


Collate = Callable[[list[Any]], Any]
"""Turns a list of samples into a batch: a dict of tensors, or a list whose last entry is the target."""


class Source(ABC):
    """The source of samples: `Samples`, which have places, or a `Stream`."""

    draws: ClassVar[bool] = False
    """Whether an item may draw random numbers (augmentation). If so, the generators of Python, NumPy and torch on the CPU, and
    those in the source's attributes, are seeded for each item: draws are the same on any number of ranks and workers, and differ
    between epochs. Without workers, items are then read between two steps, not on a thread. Draws of `collation` are seeded for
    each micro batch, so they depend on micro_size, too."""

    vocab_size: int | None = None
    """The number above all ids; None where samples hold no ids."""

    workers: int = 0
    """The number of processes that load, where the job does not give it."""

    is_estimate: bool = False
    """Whether the number of samples and their lengths are estimates; allowed only if the context `may_estimate`."""

    remark: str = ""
    """A clause for the screen about settings of the data set that are in use."""

    def collation(self) -> Collate | None:
        """The function that makes micro batches; None stacks samples of one shape (torch's default_collate).

        The trainer pads batches by token budget, so `[batch] tokens` refuses a dataset with a collation.
        """
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that differs where any sample does: compared across ranks and on resume. Cheap to make."""


class Samples(Source):
    """A finite list of samples; the trainer decides on order, batches and ranks."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Sample `index`: a dict of tensors (`input_ids`, `labels`: each (seq,)) or a tuple whose last is the target."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples with these indices; override it where several at once are faster."""
        return [self[index] for index in indices]

    def batch(self, indices: Sequence[int]) -> Batch | None:
        """Samples as default_collate stacks them, where that is faster at once and draws nothing; None: it is not."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch, from 0, of the training samples that are asked for next; called where it changes."""

    def lengths(self) -> Lengths | None:
        """The number of tokens of each sample, without loading any; None where it is not known.

        Batches by token budget need it. The length of a sample is the first dim of its entries that the model pads.
        """
        return None

    def weights(self) -> Weights | None:
        """The weights that training draws samples by, with replacement; None takes each sample once in an epoch."""
        return None

    def mixture(self) -> Mixture | None:
        """The parts that training draws samples from, each in an order of its own; None for a single part. Excludes `weights`."""
        return None


class Stream(Source):
    """Samples one after another. The stream decides on their order, the trainer on batches, and it starts the stream again."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """The items of the epoch, from its beginning or from the state that was loaded just before; the same on every rank."""

    def length(self) -> int | None:
        """The number of items in an epoch; None where it is not known."""
        return None

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch, from 0, of the items that are asked for next."""

    @property
    def shards(self) -> bool:
        """Whether the stream has a `shard`. If not, every data-parallel rank reads all items and keeps its own."""
        return False

    def shard(self, count: int, index: int) -> Stream:
        """The part of reader `index` of `count`. The parts are disjoint, and none is empty."""
        raise NotImplementedError

    def state(self) -> Any:
        """The state from which `load_state` continues after the newest item, as a value for `encode_value`; None if the stream
        can't continue."""
        return None

    def load_state(self, state: Any) -> None:
        """Let the next iterator continue from this state."""


def _here(name: str, action: Callable[[], Any]) -> Any:
    return action()


@dataclass(frozen=True)
class DatasetContext:
    """The rest of the job, as far as a dataset needs it."""

    seq_length: int | None
    """The most tokens per sample: `[dataset] seq_length`, else the model's max_seq_length."""

    vocab_size: int | None
    """The number of ids in the model's vocabulary."""

    seed: int

    cache: Path = field(default_factory=cache_directory)
    """`[dataset] cache`: a directory for prepared data, which jobs and nodes may share (`hpctrain.toolkit.cache`)."""

    once_per_node: Callable[[str, Callable[[], Any]], Any] = _here  # no lambda: processes that load may get the context
    """`once_per_node(name, action)`: one rank of each node runs `action`, on a thread that may use the cores of all ranks of the
    node. Its value, which must be small (see `gather_values`), is returned on all ranks of the node; an exception on any node is
    raised on all ranks. All ranks must call it, however long `action` takes. A second call with this name returns the first
    call's value.
    """

    by_tokens: bool = False
    """Whether batches are cut by tokens, which needs the samples' `lengths`."""

    may_estimate: bool = False
    """Whether nobody will train on the samples (`hpctrain check`): their number may be an estimate where counting is costly."""


class Dataset(Plugin):
    """Opens the samples of a split. A dataset without such a split returns None; only commands ask for "test"."""

    @abstractmethod
    def open(self, split: Split, context: DatasetContext) -> Samples | Stream | None:
        """The samples of `split`; raises UsageError for a missing file or an impossible option."""


class TextDataset(Dataset):
    """A dataset whose samples are text, so a language model's continuation can be read (`hpctrain sample`)."""

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """The number above all ids that `decode` knows."""

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, as in the samples."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; U+FFFD stands for incomplete characters."""
