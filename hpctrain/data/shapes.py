"""Shapes of micro batches: how many tokens they take, the padding of their samples, and axes that take one shape only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hpctrain.base.errors import TrainingError
from hpctrain.base.torch_attention import Documents
from hpctrain.contracts.dataset import Collate, Source
from hpctrain.contracts.model import Batch, PaddedModel, tensors_in
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job


@dataclass(frozen=True)
class Padding:
    """Pads samples at their ends to a common length, a multiple of `multiple`.

    values: the padding value of each padded entry (PaddedModel.padding); other entries are stacked unchanged. optional: those that
    samples need not have.
    """

    values: Mapping[str, float]
    multiple: int
    optional: frozenset[str] = frozenset()

    def __call__(self, samples: Sequence[Any]) -> dict[str, Tensor]:
        """Pad and stack samples, which are dicts of tensors: `(length, ...)` -> `(samples, longest, ...)`."""
        for sample in samples:
            needed = [name for name in self.values if name not in self.optional]
            if not isinstance(sample, dict) or not sample.keys() >= set(needed):
                found = ", ".join(sample) if isinstance(sample, dict) else type(sample).__name__
                raise TrainingError(
                    f"[batch] tokens: expected samples that are dicts with {', '.join(needed)}, found {found}"
                )
        return {key: self._stacked(key, [sample[key] for sample in samples]) for key in samples[0]}

    def blank(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A batch of one row that is all padding: its loss and its gradients are 0."""
        return {
            key: torch.full_like(tensor[:1, : self.multiple], self.values[key]) if key in self.values else tensor[:1]
            for key, tensor in batch.items()
        }

    def _stacked(self, key: str, tensors: Sequence[Tensor]) -> Tensor:
        if key not in self.values:
            return torch.stack([torch.as_tensor(tensor) for tensor in tensors])
        longest = -(-max(map(len, tensors)) // self.multiple) * self.multiple
        batch = tensors[0].new_full((len(tensors), longest, *tensors[0].shape[1:]), self.values[key])
        for row, tensor in zip(batch, tensors, strict=True):
            row[: len(tensor)] = tensor
        return batch


class Packing(Padding):
    """Lays samples one behind the other in one row, each padded at its end to a multiple of `multiple`."""

    def __call__(self, samples: Sequence[Any]) -> dict[str, Any]:
        """Join samples, which are dicts of tensors: `(length, ...)` -> `(1, tokens, ...)`, with `positions` and `documents`."""
        rows = [super(Packing, self).__call__([sample]) for sample in samples]
        strange = next((key for row in rows for key in row if key not in self.values), None)
        if strange is not None or any(row.keys() != rows[0].keys() for row in rows):
            why = "samples with other entries than others" if strange is None else f"the entry {strange!r}"
            raise TrainingError(
                f"[batch] packing: found {why}; expected the same entries in all of them, a value for each token: "
                f"{', '.join(self.values)}"
            )
        joined = {key: torch.cat([row[key] for row in rows], dim=1) for key in rows[0]}
        return self._with_places(joined, [next(iter(row.values())).shape[1] for row in rows])

    def blank(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        tensors = {key: batch[key] for key in self.values if key in batch}
        return self._with_places(super().blank(tensors), [self.multiple])

    @staticmethod
    def _with_places(tensors: dict[str, Tensor], lengths: list[int]) -> dict[str, Any]:
        return {
            **tensors,
            "positions": torch.cat([torch.arange(length) for length in lengths]),
            "documents": Documents(lengths),
        }


@dataclass(frozen=True)
class PaddedStack:
    """Stacks samples, and pads them where their lengths differ or can't be cut over the ranks that share them."""

    padding: Padding

    def __call__(self, samples: list[Any]) -> Any:
        """The batch that torch's default_collate makes, or a padded one."""
        if all(isinstance(sample, dict) and sample.keys() == samples[0].keys() for sample in samples):
            named = [name for name in self.padding.values if name in samples[0]]  # others have one shape
            for name in named:
                lengths = {len(sample[name]) for sample in samples if getattr(sample[name], "shape", ())}
                if len(lengths) > 1 or any(length % self.padding.multiple for length in lengths):
                    return self.padding(samples)
        return default_collate(samples)


def make_collation(job: Job, parts: Parts, samples: Source) -> Collate:
    """How samples become a batch: as the data set says, else stacked, and padded where the model and the lengths ask for it."""
    padding = None
    if isinstance(parts.model, PaddedModel):
        kind = Packing if job.batch.packing else Padding
        padding = kind(parts.model.padding(), sequence_multiple(job, parts), parts.model.optional_entries)
    if job.batch.tokens is None:
        return samples.collation() or (default_collate if padding is None else PaddedStack(padding))
    assert padding is not None  # checked with the job
    return padding


def capacity(job: Job, parts: Parts) -> int:
    """Tokens of a micro batch, over all ranks that share its samples."""
    return (job.batch.micro_tokens or 0) * ranks_of_a_sample(job, parts)


def ranks_of_a_sample(job: Job, parts: Parts) -> int:
    """The number of ranks over which a sample is cut."""
    return prod(job.parallelism[name].size for name, plugin in parts.parallelism.items() if plugin.traits.cuts_samples)


def sequence_multiple(job: Job, parts: Parts) -> int:
    """The number that must divide a batch's length, so that each axis can cut its part from the outer axes' parts."""
    multiple, ranks = 1, 1  # ranks: those that share a sample
    for name, plugin in sorted(parts.parallelism.items(), key=lambda item: item[1].traits.order):
        size = job.parallelism[name].size
        multiple = lcm(multiple, ranks * plugin.sequence_multiple(size, parts.model))
        ranks *= size if plugin.traits.cuts_samples else 1  # an inner axis cuts the outer ones' parts
    return multiple


def axis_of_one_shape(job: Job, parts: Parts) -> str | None:
    """The name of an axis that takes micro batches of one shape only."""
    for name, plugin in parts.parallelism.items():
        when = plugin.traits.one_shape
        if when == "always" or (when == "compiled" and job.compile.enabled):
            return name
    return None


class OneShape:
    """Cuts this rank's part out of micro batches, all of the shape of the first: a stage that waits for another shape hangs."""

    def __init__(self, split: Callable[[Batch], Batch], axis: str) -> None:
        self._split, self._axis = split, axis
        self._first: list[tuple[int, ...]] | None = None

    def __call__(self, batch: Batch) -> Batch:
        """Raises TrainingError for another shape."""
        shapes = [tuple(one.shape) for one in tensors_in(batch)]
        if self._first is None:
            self._first = shapes
        elif shapes != self._first:
            raise TrainingError(
                f"[parallelism] {self._axis} takes micro batches of one shape, found {self._first} and {shapes}; pad every sample "
                "to one length"
            )
        return self._split(batch)
