"""Any data set of the user's: map-style, or an iterable one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hpctrain.base.errors import UsageError
from hpctrain.contracts.dataset import Dataset, DatasetContext, Samples, Split, Stream
from hpctrain.plugins.user_code.calling import users_code
from hpctrain.plugins.user_code.data_loader import take_over
from hpctrain.plugins.user_code.reference import refuse_arguments, resolve
from hpctrain.plugins.user_code.samples import UserCollation, UserSamples, Weighing
from hpctrain.plugins.user_code.stream import UserStream


class UserDataset(Dataset):
    """Calls callable(split="train" | "validation", **options), which returns None if there is no such split."""

    name = "package.module:callable"

    def __init__(
        self,
        reference: str,
        factory: Callable[..., Any],
        options: dict[str, Any],
        collation: UserCollation | None,
        weigh: Weighing | None,
    ) -> None:
        super().__init__(options)
        self.name = self.reference = reference  # type: ignore[misc]  # its name in the job file, for messages
        self._factory, self._collation, self._weigh = factory, collation, weigh

    @classmethod
    def from_table(
        cls, reference: str, options: dict[str, Any], collate: object = None, weights: object = None
    ) -> UserDataset:
        """Raises UsageError for a callable that does not exist or does not take the options."""
        factory = resolve(reference)
        refuse_arguments(reference, factory, {"split": "train", **options})
        collation = UserCollation.from_reference(collate) if isinstance(collate, str) else None
        weigh = Weighing.from_reference(weights) if isinstance(weights, str) else None
        return cls(reference, factory, options, collation, weigh)

    def open(self, split: Split, context: DatasetContext) -> Samples | Stream | None:
        what = f"[dataset] name = {self.reference!r}"
        with users_code(what):
            source = self._factory(split=split, **self.options)
        if source is None:
            return None
        if not isinstance(source, DataLoader):
            return self._opened(what, source, self._collation)
        taken = take_over(what, source)
        own = None if taken.collate is None else UserCollation(f"{what}: the DataLoader's collate_fn", taken.collate)
        opened = self._opened(what, taken.dataset, self._collation or own)
        opened.workers, opened.remark = taken.workers, taken.remark
        return opened

    def _opened(self, what: str, source: Any, collation: UserCollation | None) -> Samples | Stream:
        if isinstance(source, IterableDataset) or (hasattr(source, "__iter__") and not hasattr(source, "__getitem__")):
            self._refuse_stream(what, source)
            return UserStream(self.reference, source, collation)
        if not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise UsageError(
                f"{what} returned {type(source).__name__}, expected __len__ and __getitem__, or an iterable data set with __iter__"
            )
        return UserSamples(self.reference, source, collation, self._weigh)

    def _refuse_stream(self, what: str, source: Any) -> None:
        if isinstance(source, Iterator) and not isinstance(source, IterableDataset):
            raise UsageError(
                f"{what} returned {type(source).__name__}, which can be read once only; expected an object whose __iter__ begins "
                "anew, such as a torch.utils.data.IterableDataset"
            )
        if self._weigh is not None:
            why = "which weights can't draw from; leave them out, or return samples by index (__len__ and __getitem__)"
            raise UsageError(f"[dataset] weights: {self.reference!r} returned {type(source).__name__}, a stream, {why}")
