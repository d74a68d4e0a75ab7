"""A data set of the user's, or a torch.utils.data.DataLoader around one."""

from __future__ import annotations

from collections.abc import Iterator
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
from hpctrain.contracts.dataset import Dataset, DatasetContext, Samples, Split, Stream
from hpctrain.registry.blame import users_code
from hpctrain.registry.user_code.reference import refuse_arguments, resolve
from hpctrain.registry.user_code.samples import UserCollation, UserSamples, UserStream, weigh_by

# arguments of a DataLoader that have no effect here, with their defaults; the screen names those that were given
_UNUSED = {"drop_last": False, "pin_memory": False, "generator": None, "timeout": 0, "persistent_workers": False}


class UserDataset(Dataset):
    """Calls callable(split="train" | "validation", **options), which returns None if there is no such split."""

    name = "package.module:callable"

    def __init__(self, reference: str, options: dict[str, Any], collate: object = None, weights: object = None) -> None:
        """collate and weights: values of the table, whose types the core checks. Raises UsageError for a callable that does not
        exist or does not take the options."""
        super().__init__(options)
        self.name = reference  # type: ignore[misc]  # as in the job file, for messages
        self._what = f"[dataset] name = {reference!r}"
        self._factory = resolve(reference)
        refuse_arguments(reference, self._factory, {"split": "train", **options})
        self._collation = UserCollation.from_reference(collate) if isinstance(collate, str) else None
        self._weigh = weigh_by(weights) if isinstance(weights, str) else None

    def open(self, split: Split, context: DatasetContext) -> Samples | Stream | None:
        with users_code(self._what):
            source = self._factory(split=split, **self.options)
        if source is None:
            return None
        return self._of_loader(source) if isinstance(source, DataLoader) else self._opened(source, self._collation)

    def _opened(self, source: Any, collation: UserCollation | None) -> Samples | Stream:
        what = f"{self._what} returned {type(source).__name__}"
        # torch's IterableDataset inherits a __getitem__, which raises
        if isinstance(source, IterableDataset) or (hasattr(source, "__iter__") and not hasattr(source, "__getitem__")):
            if isinstance(source, Iterator) and not isinstance(source, IterableDataset):
                raise UsageError(
                    f"{what}, which can be read once only; expected an object whose __iter__ begins anew, such as a "
                    "torch.utils.data.IterableDataset"
                )
            if self._weigh is not None:
                raise UsageError(
                    f"[dataset] weights: {self.name!r} returned {type(source).__name__}, a stream, which weights can't draw "
                    "from; leave them out, or return samples by index (__len__ and __getitem__)"
                )
            return UserStream(self.name, source, collation)
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise UsageError(f"{what}, expected __len__ and __getitem__, or an iterable data set with __iter__")
        return UserSamples(self.name, source, collation, self._weigh)

    def _of_loader(self, loader: DataLoader[Any]) -> Samples | Stream:
        """The data set of a DataLoader, with its collate_fn and num_workers. Raises UsageError for settings that can't be kept and
        would change the samples."""
        what, batches = f"{self._what} returned a DataLoader", loader.batch_sampler
        if batches is None:
            raise UsageError(
                f"{what} with batch_size=None, whose data set makes batches itself; expected samples, of which hpctrain makes "
                "batches"
            )
        if type(batches) is not BatchSampler:  # a subclass may draw in any way
            raise UsageError(
                f"{what} with a batch_sampler of its own ({type(batches).__name__}), which can't be used: batches are dealt out to "
                "ranks by [batch]; leave it out, or return the data set"
            )
        if loader.worker_init_fn is not None:
            raise UsageError(
                f"{what} with a worker_init_fn, which can't be used; leave it out: samples draw by the job's seed, and files can "
                "be opened where the first sample is read"
            )
        own, order = None, ""
        if not isinstance(loader.dataset, IterableDataset):
            _refuse_sampler(what, batches.sampler, len(loader.dataset))  # type: ignore[arg-type]
            order = f" and {type(batches.sampler).__name__}"
        if loader.collate_fn is not default_collate:
            own = UserCollation(f"{self._what}: the DataLoader's collate_fn", loader.collate_fn)
        unused = [
            f"{key} = {getattr(loader, key)}" + " (see [batch] drop_last)" * (key == "drop_last")
            for key, default in _UNUSED.items()
            if getattr(loader, key) != default
        ]
        opened = self._opened(loader.dataset, self._collation or own)  # the job's key rather than the loader's
        opened.workers = loader.num_workers  # [dataset] workers goes before it
        opened.remark = (
            f"of the DataLoader are used the data set{', collate_fn' if own else ''} and num_workers = {loader.num_workers}; "
            f"its batch_size = {batches.batch_size}{order} are not, since [batch] and [job] seed decide"
            + (f"; nor are {', '.join(unused)}" if unused else "")
        )
        return opened


def _refuse_sampler(what: str, sampler: Any, samples: int) -> None:
    """Raise UsageError for a sampler that takes anything but each sample once."""
    if isinstance(sampler, WeightedRandomSampler):
        raise UsageError(
            f"{what} with a WeightedRandomSampler; give its weights as [dataset] weights or as the data set's sample_weights, "
            "which are the same on any number of ranks"
        )
    takes_each_once = isinstance(sampler, (SequentialSampler, DistributedSampler))  # the latter over all ranks
    if isinstance(sampler, RandomSampler):
        takes_each_once = not sampler.replacement and sampler.num_samples == samples
    if not takes_each_once:
        raise UsageError(
            f"{what} with the sampler {type(sampler).__name__}, which can't be used: hpctrain takes each sample once in an epoch; "
            "use torch.utils.data.Subset for some of them, or [dataset] weights"
        )
