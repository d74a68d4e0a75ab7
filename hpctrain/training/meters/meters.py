"""The meters of a rank, and the part of a step's row that they give."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from statistics import fmean

import torch
import torch.distributed as dist

from hpctrain.contracts.precision import Precision
from hpctrain.contracts.runner import MicroBatch
from hpctrain.training.meters.clock import PARTS, Clock
from hpctrain.training.meters.device_load import DeviceLoad
from hpctrain.training.meters.memory import KINDS, memory_since, resident_bytes
from hpctrain.training.meters.stragglers import Stragglers
from hpctrain.training.meters.throughput import ModelFlops, peak_flops
from hpctrain.training.meters.traffic import Traffic
from hpctrain.training.metrics import MeasuredRow, OwnRow

_SIZES = (len(PARTS), len(PARTS), 1, len(KINDS), 2)
"""How many figures a rank tells of each kind: times, own times, operations, memory, load."""
_PACE = 0.5
"""Seconds after which the resident memory is looked up again."""
_PLACES = list(pairwise(accumulate(_SIZES, initial=0)))


class Meters:
    """Measures each step. Nothing here waits for an accelerator or communicates: the ranks exchange `figures` with others."""

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        nodes: Sequence[str],
        groups: Mapping[str, dist.ProcessGroup],
        copies: int,
        countable: bool,
        is_forward: Callable[[], bool] = lambda: False,
    ) -> None:
        """nodes: of each rank. groups: by the names of their axes. copies, countable, is_forward: of ModelFlops."""
        self.clock, self._device, self._ranks = Clock(device), device, len(nodes)
        self._stragglers, self._flops = Stragglers(nodes), ModelFlops(copies, countable, is_forward)
        self._load, self._traffic = DeviceLoad(device), Traffic(groups)
        self._peak = peak_flops(device, precision)
        self._resident, self._looked = 0, -math.inf

    def counting(self, micro_batches: Sequence[MicroBatch]) -> AbstractContextManager[None]:
        """A context for the forwards and backwards of a step."""
        return self._flops.counting(micro_batches)

    def count_again(self) -> None:
        """Count the operations of the next step anew: this one left forwards out."""
        self._flops.count_again()

    def figures(self, micro_batches: Sequence[MicroBatch], has_known_forwards: bool = True) -> list[float]:
        """This rank's figures for `row`, from the last call until now. has_known_forwards: one of each micro batch."""
        times = self.clock.take()
        times.own[PARTS.index("data")] = sum(one.load_seconds for one in micro_batches)
        operations = self._flops.of(micro_batches) if has_known_forwards else 0.0
        if time.monotonic() > self._looked + _PACE:
            self._resident, self._looked = resident_bytes(), time.monotonic()
        memory = memory_since(self._device, self._resident)
        return [*times.parts, *times.own, operations, *memory, *self._load.take()]

    def row(self, ranks: Sequence[Sequence[float]], seconds: float, tell: Callable[[str], None]) -> MeasuredRow:
        """The measurements of a step that took so many seconds. ranks: the figures of each. tell: is given a sentence about a slow
        rank, once."""
        times, own, operations, memory, load = ([one[begin:end] for one in ranks] for begin, end in _PLACES)
        slow = self._stragglers.see(own, times, seconds)
        news = None if slow is None else self._stragglers.news(slow)
        if news is not None:
            tell(news)
        flops = sum(one[0] for one in operations) / seconds
        utilization, watts = (_over_ranks([one[place] for one in load]) for place in (0, 1))
        return MeasuredRow(
            seconds=dict(zip(PARTS, map(fmean, zip(*times, strict=True)), strict=True)),
            straggler=None if slow is None else slow.as_dict(),
            model_flops_per_second=flops or None,
            mfu=flops / (self._peak * self._ranks) if self._peak is not None and flops else None,
            memory={
                kind: {name: int(one) for name, one in _over_ranks(values).items()}
                for kind, values in zip(KINDS, zip(*memory, strict=True), strict=True)
                if any(values)
            },
            utilization=utilization,
            watts=watts,
        )

    def traffic(self) -> OwnRow:
        """This rank's tables of its communication since the last call."""
        return self._traffic.take()

    def close(self) -> None:
        """End the background thread."""
        self._load.close()


def _over_ranks(values: Sequence[float]) -> dict[str, float]:
    """The largest and the mean of the known ones; empty if all are NaN."""
    known = [one for one in values if not math.isnan(one)]
    return {"rank_max": max(known), "rank_mean": fmean(known)} if known else {}
