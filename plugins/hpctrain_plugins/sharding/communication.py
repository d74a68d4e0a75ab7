"""How stage 3 gathers parameters and sums gradients: as fully_shard does, but not waiting on CPU ranks either.

A GPU's collectives run on a stream of their own. Those of CPU tensors hold their caller unless they are started
asynchronously, which fully_shard does not do by itself.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.api import BucketSum, GradientBucket, GradientSums

_IN_FLIGHT = 2
"""Units whose gradients may be on their way while backward goes on."""

Pending = deque[Callable[[], None]]
"""What waits for sums that are under way, of all units."""


class Buffers:
    """Host memory that units use in turns: memory that is new to the process costs more time than what is done to it.

    There are as many buffers as were ever in use at a time, none larger than was asked for.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, size: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """A flat buffer of unknown content, nobody else's until it is given back."""
        nbytes = prod(size) * dtype.itemsize
        fitting = [number for number, one in enumerate(self._free) if one.untyped_storage().nbytes() >= nbytes]
        if fitting:
            whole = torch.empty(0, dtype=torch.uint8).set_(self._free.pop(fitting[0]).untyped_storage())
        else:
            if self._free:
                self._free.pop()  # too small: the new one takes its place
            whole = torch.empty(nbytes, dtype=torch.uint8)
        return whole[:nbytes].view(dtype)

    def give_back(self, buffer: Tensor) -> None:
        """Nobody uses what `take` gave any more. May be called wherever memory is collected, in any mode of torch's: no
        operator here."""
        self._free.append(buffer)


class AsynchronousAllGather:
    """On CPU ranks. fully_shard waits for what is returned when it needs the parameters, and drops it with the buffer."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """What a unit is gathered into."""
        return self._buffers.take(size, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        weakref.finalize(work, self._buffers.give_back, output_tensor)
        return work


class SummingReduceScatter:
    """One unit's. Sums through the job's compression, whatever operation fully_shard asks for: the loss is divided.

    fully_shard makes views of the output, and reads them only to add to them: when the unit is reached a second time
    in one backward, or in the next one unless `finish` was called and the gradients were taken away before.
    """

    def __init__(self, sums: GradientSums, pending: Pending, buffers: Buffers) -> None:
        self._sums, self._pending, self._buffers = sums, pending, buffers
        self._sum: BucketSum | None = None
        self._used = self._has_input = False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """First the input, which is a buffer, then the output, which stays as the gradient."""
        self._has_input = not self._has_input
        if self._has_input and device.type == "cpu":
            return self._buffers.take(size, dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if self._sum is None:
            content = GradientBucket([], input_tensor.numel(), input_tensor.dtype, input_tensor.device)
            self._sum = self._sums.bucket(content, "dp_shard")
        finish = self._sum.reduce_scatter(output_tensor, input_tensor)
        if output_tensor.device.type != "cpu":
            finish()  # holds this stream, not the program
            return

        def finish_and_give_back() -> None:
            finish()
            self._buffers.give_back(input_tensor)

        self._pending.append(finish_and_give_back)
        while len(self._pending) > (0 if self._used else _IN_FLIGHT):
            self._pending.popleft()()
        self._used = True

    def finish(self) -> None:
        """Backward is over: wait until every sum is there."""
        self._used = False
        while self._pending:
            self._pending.popleft()()
