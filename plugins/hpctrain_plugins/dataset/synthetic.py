"""`synthetic`: random tokens in any number, for benchmarks and tests of the machine."""

from __future__ import annotations

import numpy as np
import torch

from hpctrain.api import Dataset, DatasetContext, Field, Options, Samples, Split, UsageError, hookimpl


class SyntheticOptions(Options):
    samples: int = Field(default=10_000, ge=1, description="samples per epoch")
    validation_samples: int = Field(default=64, ge=0, description="samples of the validation split")


class _RandomTokens(Samples):
    """Sample i is drawn from (seed, split, i)."""

    def __init__(self, count: int, seq_length: int, vocab_size: int, seed: tuple[int, ...]) -> None:
        self._count, self._seq, self._seed = count, seq_length, seed
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._seed, index))))
        ids = torch.from_numpy(generator.integers(0, self.vocab_size, self._seq + 1))
        return {"input_ids": ids[:-1], "labels": ids[1:]}

    def fingerprint(self) -> str:
        return f"synthetic {self._count} {self._seq} {self.vocab_size} {self._seed}"


class Synthetic(Dataset):
    """Uniformly random ids below the model's vocab_size."""

    name = "synthetic"
    Options = SyntheticOptions
    options: SyntheticOptions

    def open(self, split: Split, context: DatasetContext) -> Samples | None:
        if context.seq_length is None or context.vocab_size is None:
            raise UsageError("[dataset] synthetic: needs a model with max_seq_length and vocab_size, as gpt")
        count = self.options.samples if split == "train" else self.options.validation_samples
        if count == 0:
            return None
        return _RandomTokens(count, context.seq_length, context.vocab_size, (context.seed, int(split == "validation")))


@hookimpl
def hpctrain_dataset() -> list[type[Dataset]]:
    return [Synthetic]
