"""The slot `dataset`: samples by index, and a fingerprint that says which samples they are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hpctrain.contracts.plugin import Plugin

Split = Literal["train", "validation"]
Lengths = np.ndarray[Any, np.dtype[np.int64]]
"""Tokens of each sample, `(samples,)`."""


class Samples(ABC):
    """A finite list of samples; the trainer decides on order, batches and ranks."""

    vocab_size: int | None = None
    """Ids are smaller than this; None where samples hold no ids."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Sample `index`: a dict of tensors (`input_ids`, `labels`: each (seq,)) or a tuple whose last is the target."""

    def lengths(self) -> Lengths | None:
        """How many tokens each sample has, without loading any; None where that is not known.

        Batches by token budget need it. The length of a sample is the first dim of its entries that the model pads.
        """
        return None

    @abstractmethod
    def fingerprint(self) -> str:
        """A text that differs when any sample would: compared across ranks and on resume. Cheap to make."""


@dataclass(frozen=True)
class DatasetContext:
    """What the rest of the job says to a dataset."""

    seq_length: int | None
    """Tokens per sample, at most: `[dataset] seq_length`, else the model's max_seq_length."""

    vocab_size: int | None
    """The model's vocabulary."""

    seed: int


class Dataset(Plugin):
    """Opens the samples of a split. A dataset without a validation split returns None for it."""

    @abstractmethod
    def open(self, split: Split, context: DatasetContext) -> Samples | None:
        """The samples of `split`; raises UsageError for a missing file or an impossible option."""
