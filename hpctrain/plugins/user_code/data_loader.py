"""Takes over a torch.utils.data.DataLoader of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

from hpctrain.base.errors import UsageError

_UNUSED = {"drop_last": False, "pin_memory": False, "generator": None, "timeout": 0, "persistent_workers": False}
"""Arguments that have no effect here, with their defaults; the screen names those that were given."""


@dataclass(frozen=True)
class TakenOver:
    """remark: what of the DataLoader is used and what is not, for the screen."""

    dataset: Any
    collate: Callable[[list[Any]], Any] | None
    workers: int
    remark: str


def take_over(what: str, loader: DataLoader[Any]) -> TakenOver:
    """Raises UsageError for what would change the samples without a trace. what: the subject of the sentences."""
    batches, dataset = loader.batch_sampler, loader.dataset
    if batches is None:
        raise UsageError(
            f"{what} returned a DataLoader with batch_size=None, whose data set makes batches itself; expected samples, of which "
            "hpctrain makes batches"
        )
    if type(batches) is not BatchSampler:
        raise UsageError(
            f"{what} returned a DataLoader with a batch_sampler of its own ({type(batches).__name__}), which can't be used: "
            "batches are dealt out to ranks by [batch]; leave it out, or return the data set"
        )
    if loader.worker_init_fn is not None:
        raise UsageError(
            f"{what} returned a DataLoader with a worker_init_fn, which can't be used; leave it out: samples draw by the job's "
            "seed, and files can be opened where the first sample is read"
        )
    sampler: Any = batches.sampler
    if not isinstance(dataset, IterableDataset):
        _refuse_sampler(what, sampler, len(dataset))  # type: ignore[arg-type]
    order = "" if isinstance(dataset, IterableDataset) else f" and {type(sampler).__name__}"
    unused = [
        f"{key} = {getattr(loader, key)}" + " (see [batch] drop_last)" * (key == "drop_last")
        for key, default in _UNUSED.items()
        if getattr(loader, key) != default
    ]
    custom = None if loader.collate_fn is default_collate else loader.collate_fn
    return TakenOver(
        dataset,
        custom,
        loader.num_workers,
        f"of the DataLoader are used the data set{', collate_fn' if custom else ''} and num_workers = {loader.num_workers}; "
        f"its batch_size = {batches.batch_size}{order} are not, since [batch] and [job] seed decide"
        + (f"; nor are {', '.join(unused)}" if unused else ""),
    )


def _refuse_sampler(what: str, sampler: Any, samples: int) -> None:
    """UsageError for a sampler that takes other samples than each one once."""
    if isinstance(sampler, WeightedRandomSampler):
        raise UsageError(
            f"{what} returned a DataLoader with a WeightedRandomSampler; give its weights as [dataset] weights or as the data "
            "set's sample_weights, which are the same on any number of ranks"
        )
    known = isinstance(sampler, (SequentialSampler, DistributedSampler))
    if isinstance(sampler, RandomSampler):
        known = not sampler.replacement and sampler.num_samples == samples
    if not known:
        raise UsageError(
            f"{what} returned a DataLoader with the sampler {type(sampler).__name__}, which can't be used: hpctrain takes each "
            "sample once in an epoch; use torch.utils.data.Subset for some of them, or [dataset] weights"
        )
