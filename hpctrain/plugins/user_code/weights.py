"""A function of the user's that gives the weights of samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hpctrain.base.errors import UsageError
from hpctrain.contracts.dataset import Weights
from hpctrain.plugins.user_code.calling import users_code
from hpctrain.plugins.user_code.reference import resolve_for


@dataclass(frozen=True)
class Weighing:
    """Calls function(dataset) with the object that the dataset's callable returned."""

    what: str
    function: Callable[[Any], Any]

    @classmethod
    def from_reference(cls, reference: str) -> Weighing:
        """Raises UsageError for what cannot be called with a data set."""
        what = f"[dataset] weights = {reference!r}"
        return cls(what, resolve_for(what, reference, "the data set"))

    def __call__(self, source: Any) -> Weights:
        with users_code(self.what):
            found = self.function(source)
        return as_weights(self.what, found)


def as_weights(what: str, found: Any) -> Weights:
    """Numbers as an array; UsageError that begins with `what` for anything else."""
    try:
        if isinstance(found, (np.ndarray, Tensor, list, tuple)):  # numpy would read through a data set, too
            return np.asarray(found, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise UsageError(f"{what}: found {type(found).__name__}, expected numbers, one for each sample")
