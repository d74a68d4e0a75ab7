"""The sums of a model's named losses over all ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.errors import TrainingError
from hpctrain.ranks.exchange import gather_values


class NamedLosses:
    """Collects on this rank what the losses of a dict come to, until they are summed."""

    def __init__(self, share: float) -> None:
        """share: the weight of this rank's losses: 0 if another rank counts the same ones."""
        self._share = share
        self._mine: dict[str, Tensor] = {}
        self._names: list[str] | None = None

    def add(self, losses: Mapping[str, Tensor]) -> None:
        """The losses of one micro batch, each a scalar."""
        for name, value in losses.items():
            self._mine[name] = self._mine.get(name, torch.zeros_like(value, dtype=torch.float64)) + value.detach()

    def forget(self) -> list[str]:
        """Drop what was added on this rank; return its names."""
        names, self._mine = list(self._mine), {}
        return names

    def take(self, count: float) -> dict[str, float]:
        """Each name's sum over all ranks divided by `count`, and begin anew. Empty for a model with one loss. Collective.

        The names are those of the first call: only ranks with the model's outputs know them. Raises TrainingError for others.
        """
        mine, self._mine = self._mine, {}
        if self._names is None:
            self._names = list(dict.fromkeys(name for names in gather_values(list(mine)) for name in names))
        new = [name for name in mine if name not in self._names]
        if new:
            raise TrainingError(
                f"the loss returned {new[0]!r}, expected the names of the first step: {', '.join(self._names) or 'none'}"
            )
        if not self._names:
            return {}
        sums = torch.tensor([float(mine[name]) if name in mine else 0.0 for name in self._names], dtype=torch.float64)
        sums *= self._share
        dist.all_reduce(sums)
        return dict(zip(self._names, (sums / count).tolist(), strict=True))
