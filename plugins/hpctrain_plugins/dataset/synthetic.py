"""`synthetic`: any number of random tokens, for benchmarks and tests of the machine."""

from __future__ import annotations

import numpy as np
import torch

from hpctrain.api import Dataset, DatasetContext, Field, Lengths, Options, Samples, Split, UsageError, hookimpl


class SyntheticOptions(Options):
    samples: int = Field(default=10_000, ge=1, le=10**8, description="samples per epoch")
    validation_samples: int = Field(default=64, ge=0, le=10**8, description="samples of the validation split")
    min_length: int | None = Field(
        default=None, ge=1, description="shortest sample, in tokens; lengths are drawn from min_length to seq_length"
    )


class _RandomTokens(Samples):
    """Sample i is drawn from (seed, split, i), its length from (seed, split)."""

    def __init__(self, count: int, shortest: int, longest: int, vocab_size: int, seed: tuple[int, ...]) -> None:
        self._count, self._range, self._seed = count, (shortest, longest), seed
        self.vocab_size = vocab_size
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
        drawn = shortest < longest
        self._lengths: Lengths = (
            generator.integers(shortest, longest + 1, count) if drawn else np.broadcast_to(np.int64(longest), (count,))
        )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((*self._seed, index))))
        ids = torch.from_numpy(generator.integers(0, self.vocab_size, self._lengths[index] + 1))
        return {"input_ids": ids[:-1], "labels": ids[1:]}

    def lengths(self) -> Lengths:
        return self._lengths

    def fingerprint(self) -> str:
        shortest, longest = self._range
        lengths = str(longest) if shortest == longest else f"{shortest}-{longest}"
        return f"synthetic {self._count} {lengths} {self.vocab_size} {self._seed}"


class Synthetic(Dataset):
    """Uniformly random ids below the model's vocab_size."""

    name = "synthetic"
    Options = SyntheticOptions
    options: SyntheticOptions

    def open(self, split: Split, context: DatasetContext) -> Samples | None:
        if context.seq_length is None or context.vocab_size is None:
            raise UsageError("[dataset] synthetic: needs a model with max_seq_length and vocab_size, as gpt")
        shortest = self.options.min_length or context.seq_length
        if shortest > context.seq_length:
            raise UsageError(
                f"[dataset] min_length: found {shortest}, expected at most seq_length, which is {context.seq_length}"
            )
        count = {"train": self.options.samples, "validation": self.options.validation_samples}.get(split, 0)
        if count == 0:
            return None
        seed = (context.seed, int(split == "validation"))
        return _RandomTokens(count, shortest, context.seq_length, context.vocab_size, seed)


@hookimpl
def hpctrain_dataset() -> list[type[Dataset]]:
    return [Synthetic]
