"""A function of the user's that makes a batch of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hpctrain.base.errors import TrainingError
from hpctrain.plugins.user_code.calling import users_code
from hpctrain.plugins.user_code.reference import resolve_for


@dataclass(frozen=True)
class ForeignCollation:
    """Calls function(samples) and checks the batch. what: the subject of an error's sentence."""

    what: str
    function: Callable[[list[Any]], Any]

    @classmethod
    def from_reference(cls, reference: str) -> ForeignCollation:
        """Raises UsageError for what cannot be called with a list of samples."""
        what = f"[dataset] collate = {reference!r}"
        return cls(what, resolve_for(what, reference, "a list of samples"))

    def __call__(self, samples: list[Any]) -> Any:
        """The batch: a dict with `labels`, or a list whose last is the target, (samples, ...)."""
        with users_code(self.what):
            batch = self.function(samples)
        if isinstance(batch, Mapping):
            batch = dict(batch)
        elif not isinstance(batch, (list, tuple)):
            raise TrainingError(
                f"{self.what} returned {type(batch).__name__}, expected a dict of tensors with labels, or a list or tuple of "
                "tensors whose last is the target"
            )
        if not batch:
            raise TrainingError(f"{self.what} returned an empty {type(batch).__name__} for {len(samples)} samples")
        target = batch.get("labels") if isinstance(batch, dict) else batch[-1]
        if isinstance(target, Tensor) and (target.dim() == 0 or len(target) != len(samples)):
            raise TrainingError(
                f"{self.what} returned a target of shape {tuple(target.shape)} for {len(samples)} samples; expected a row for "
                f"each, ({len(samples)}, ...)"
            )
        return batch


def collation_of(reference: str, source: Any) -> ForeignCollation | None:
    """The `collate_fn` of a data set, if it has one."""
    own = getattr(source, "collate_fn", None)
    return None if own is None else ForeignCollation(f"[dataset] name = {reference!r}: its collate_fn", own)
