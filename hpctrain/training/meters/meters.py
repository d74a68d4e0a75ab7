"""The meters of a rank, and the part of a step's row that they give: where its time goes, operations, memory, traffic."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.base.accounting import OperationStatistics, statistics
from hpctrain.base.devices import begin_peak, device_name, is_accelerator
from hpctrain.base.flops import CountedFlops
from hpctrain.contracts.model import tensors_in
from hpctrain.contracts.precision import Precision
from hpctrain.contracts.runner import MicroBatch
from hpctrain.training.figures import RankFigures
from hpctrain.training.meters.clock import PARTS, Clock
from hpctrain.training.meters.memory import KINDS, memory_of, process_bytes

if TYPE_CHECKING:
    from hpctrain.training.meters.stragglers import Stragglers

# seconds after which the process's memory is looked up again
_PACE = 0.5
# the names of the group of all ranks, over which they exchange figures, and of groups of no axis, unless an axis has them
_WORLD, _OTHER = "world", "other"
# the operations of a training to those of its forwards: backward has two products for each of forward's, by the inputs and by the
# parameters (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1)
_TRAINING = 3


class Meters:
    """Measures each step. Nothing here waits for an accelerator or communicates: the ranks exchange `figures` with others."""

    def __init__(
        self,
        device: torch.device,
        precision: Precision,
        nodes: Sequence[str],
        groups: Mapping[str, dist.ProcessGroup],
        flops: ModelFlops,
    ) -> None:
        """nodes: of each rank. groups: by the names of their axes."""
        self.clock, self._device, self._ranks = Clock(device), device, len(nodes)
        self.flops, self.traffic = flops, Traffic(groups)
        self._stragglers: Stragglers | None = None
        if len(nodes) > 1:
            from hpctrain.training.meters.stragglers import Stragglers

            self._stragglers = Stragglers(nodes)
        self._peak = peak_flops(device, precision)
        self._process, self._looked = (0, 0), -math.inf

    def figures(self, micro_batches: Sequence[MicroBatch], has_known_forwards: bool = True) -> dict[str, Any]:
        """This rank's part of RankFigures, from the last call until now. has_known_forwards: one of each micro batch."""
        times, own_times = self.clock.take()
        own_times[PARTS.index("data")] = sum(one.load_seconds for one in micro_batches)
        operations = self.flops.of(micro_batches) if has_known_forwards else 0.0
        if time.monotonic() > self._looked + _PACE:
            self._process, self._looked = process_bytes(), time.monotonic()
        memory = memory_of(self._device, *self._process)
        begin_peak(self._device)  # a row has the peak since the one before
        return {"times": times, "own_times": own_times, "operations": operations, "memory": memory}

    def row(self, ranks: Sequence[RankFigures[float]], seconds: float) -> dict[str, Any]:
        """The measurements of a step that took so many seconds, by their keys, None where there is no value."""
        times = [one.times for one in ranks]
        slow = self._stragglers and self._stragglers.see([one.own_times for one in ranks], times, seconds)
        flops = sum(one.operations for one in ranks) / seconds
        return {
            "seconds": dict(zip(PARTS, map(fmean, zip(*times, strict=True)), strict=True)),
            "straggler": slow and dict(vars(slow)),
            "model_flops_per_second": flops or None,
            "mfu": flops / (self._peak * self._ranks) if self._peak is not None and flops else None,
            **{
                f"{kind}_bytes": {"rank_max": int(max(values)), "rank_mean": int(fmean(values))}
                for kind, values in zip(KINDS, zip(*(one.memory for one in ranks), strict=True), strict=True)
                if any(values)
            },
        }


class ModelFlops:
    """Counts this rank's share of a step's operations: what `ModelSpec.flops` says, else what the first step's forwards took.

    Where the compiler makes the operators, nobody counts them.
    """

    def __init__(self, copies: int, countable: bool, is_forward: Callable[[], bool]) -> None:
        """copies: ranks that work on one micro batch. countable: whether torch sees each operator. is_forward: whether the rank is
        in the phase "forward"; backwards compute forwards again, and a pipeline's first step tries one."""
        self._copies, self._countable, self._is_forward = copies, countable, is_forward
        self._per_element = 0.0

    @contextmanager
    def counting(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """A context for the forwards of a step."""
        if not self._countable or any(micro.flops is not None for micro in micro_batches):
            yield
            return
        self._countable = False
        with CountedFlops(self._is_forward) as counted:
            yield
        self._per_element = _TRAINING * counted.total / max(1, _elements(micro_batches))

    def of(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The share of these; all ranks' shares together are the step's. 0 if nobody has counted."""
        told = [micro.flops for micro in micro_batches if micro.flops is not None]
        return sum(told) / self._copies if told else self._per_element * _elements(micro_batches)


def _elements(micro_batches: Sequence[MicroBatch]) -> int:
    """The numbers that a step reads, by which the operations of later steps follow from those of the first."""
    return sum(tensor.numel() for micro in micro_batches for tensor in tensors_in(micro.batch))


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """FLOP/s of the device in the precision's arithmetic, as its vendor states them; None for others than the known ones."""
    if not is_accelerator(device):
        return None
    from hpctrain.job.machines import machine_of_device, peak_flops_of

    machine = machine_of_device(device_name(device))
    dtype = str(precision.product_dtype(device)).removeprefix("torch.")
    return None if machine is None else peak_flops_of(machine["flops"], dtype, precision.name == "tf32")


class Traffic:
    """Takes what was added since the last call of `take`. Only hpctrain.mpi knows what an operation took that nobody waited for;
    torch's backends for accelerators tell nothing."""

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """groups: by the names of their axes."""
        world = dist.group.WORLD
        self._names: dict[str, str] = {} if world is None else {world.group_name: _WORLD}
        self._names |= {group.group_name: axis for axis, group in groups.items()}
        self._axes = frozenset(groups)
        self._before = dict[tuple[str, str], OperationStatistics]()
        self.take()

    def take(self) -> dict[str, dict[str, float]]:
        """The tables of a row, each by "AXIS.OPERATION"; none without operations."""
        now = {(group, name): one for group, found in statistics().groups.items() for name, one in found.items()}
        exposed, hidden, speeds = dict[str, float](), dict[str, float](), dict[str, float]()
        for (group, name), one in now.items():
            before = self._before.get((group, name), OperationStatistics())
            calls, seconds = one.calls - before.calls, one.seconds - before.seconds
            blocked = one.blocked_seconds - before.blocked_seconds
            if calls == 0 and blocked == 0:
                continue
            place = self._names.get(group, _OTHER)
            key = f"{place}.{name}"
            exposed[key] = exposed.get(key, 0.0) + blocked
            if seconds > blocked:
                hidden[key] = hidden.get(key, 0.0) + seconds - blocked
            if seconds > 0 and place in self._axes:
                speeds[key] = (one.bytes - before.bytes) / seconds
        self._before = now
        found = {"exposed_seconds": exposed, "hidden_seconds": hidden, "bytes_per_second": speeds}
        return {key: values for key, values in found.items() if values}
