"""Data of one's own: streams with and without shards, weighted samples, sentences of several lengths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import IterableDataset

EPOCH = 50


def item(number: int, epoch: int = 0) -> dict[str, Tensor]:
    """9 ids of a synthetic language, as the model gpt takes them."""
    ids = torch.randint(61, (9,), generator=torch.Generator().manual_seed(1000 * epoch + number))
    return {"input_ids": ids[:-1], "labels": ids[1:]}


def repeated(split: str) -> list[dict[str, Tensor]]:
    """7 items of training, 3 of validation."""
    return [item(number + 500) for number in (range(7) if split == "train" else range(7, 10))]


def short(split: str) -> Any:
    """Items of 1 to 8 tokens."""
    count = 30 if split == "train" else 0
    return _Short([{key: ids[: 1 + n % 8] for key, ids in item(n + 700).items()} for n in range(count)])


class _Short(list[Any]):
    def lengths(self) -> list[int]:
        return [len(one["labels"]) for one in self]


class Flow(IterableDataset):
    """Another 50 items in each epoch; 13 of validation."""

    def __init__(self, split: str) -> None:
        self.count, self.epoch, self.split = EPOCH if split == "train" else 13, 0, split

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch if self.split == "train" else 99

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (item(number, self.epoch) for number in range(self.count))


class Sharded(Flow):
    """Each reader has every n-th item, so that the last shards end earlier."""

    def shard(self, num_shards: int, index: int) -> Any:
        part = Sharded(self.split)
        part.numbers = range(index, self.count, num_shards)  # type: ignore[attr-defined]
        return part

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (item(number, self.epoch) for number in getattr(self, "numbers", range(self.count)))


class ByRank(Flow):
    """What must not be: items that depend on the rank, under one fingerprint."""

    def fingerprint(self) -> str:
        return "the same"

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return (item(number, self.epoch) for number in range(self.count + 20 * rank))


def flow(split: str) -> Flow:
    return Flow(split)


def sharded(split: str) -> Flow:
    return Sharded(split)


def by_rank(split: str) -> Flow:
    return ByRank(split)


def both(split: str) -> Any:
    """The items of Flow, those of validation by index."""
    return Flow(split) if split == "train" else [item(number, 99) for number in range(13)]


class Sentences:
    """Of 1 to 7 words; some are rare."""

    sample_weights = torch.arange(40) % 5

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.arange(index % 7 + 1) + index % 2
        return words, words.sum() % 3

    def collate_fn(self, samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        ids = pad_sequence([words for words, _ in samples], batch_first=True, padding_value=9)
        return {"ids": ids, "labels": torch.stack([label for _, label in samples])}


def sentences(split: str) -> Any:
    return Sentences() if split == "train" else None


class Mean(nn.Module):
    """Of the words' vectors; places behind the end count nothing. ids: (batch, words) -> (batch, 3)"""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 6, padding_idx=9), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids).sum(1) / (ids != 9).sum(1, keepdim=True))
