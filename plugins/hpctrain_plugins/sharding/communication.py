"""Gathers parameters and sums gradients for stage 3, as fully_shard does, but asynchronously on CPU ranks, too.

A GPU's collectives run on their own stream. Collectives on CPU tensors block the caller unless they are started
asynchronously, which fully_shard does not do.
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

# the most units whose gradients may be in flight while backward goes on
_IN_FLIGHT = 2

Pending = deque[Callable[[], None]]
"""Functions that wait for pending sums, for all units."""


class HostBuffers:
    """Host memory that units reuse: touching fresh memory costs more time than the work on it.

    There are as many buffers as were ever in use at once, none larger than the largest request.
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def take(self, size: Sequence[Any], dtype: torch.dtype) -> Tensor:
        """A flat buffer with undefined content, exclusive until it is given back."""
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
        """Return a buffer of `take`. May run during garbage collection, in any mode of torch, so it must not call an
        operator."""
        self._free.append(buffer)


class AsynchronousAllGather:
    """The all-gather on CPU ranks. fully_shard waits for the returned work when it needs the parameters, and drops it with
    the buffer."""

    def __init__(self, buffers: HostBuffers) -> None:
        self._buffers = buffers

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer that a unit is gathered into."""
        return self._buffers.take(size, dtype)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        work = dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        weakref.finalize(work, self._buffers.give_back, output_tensor)
        return work


class SummingReduceScatter:
    """The reduce-scatter of one unit. Always sums, through the job's compression: the loss is already divided.

    fully_shard makes views of the output and reads them only to add to them. That happens if a unit is reached twice in
    one backward, or again in the next backward unless `finish` was called and the gradients were taken away before.
    """

    def __init__(self, sums: GradientSums, pending: Pending, buffers: HostBuffers) -> None:
        self._sums, self._pending, self._buffers = sums, pending, buffers
        self._sum: BucketSum | None = None
        self._used = self._has_input = False

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The first call is for the input, a reused buffer; the second is for the output, which stays as the gradient."""
        self._has_input = not self._has_input
        if self._has_input and device.type == "cpu":
            return self._buffers.take(size, dtype)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        if self._sum is None:
            content = GradientBucket(None, input_tensor.numel(), input_tensor.dtype, input_tensor.device)
            self._sum = self._sums.bucket(content, "dp_shard")
        finish = self._sum.reduce_scatter(output_tensor, input_tensor)
        if output_tensor.device.type != "cpu":
            finish()  # blocks this stream, not the program
            return

        def finish_and_give_back() -> None:
            finish()
            self._buffers.give_back(input_tensor)

        self._pending.append(finish_and_give_back)
        while len(self._pending) > (0 if self._used else _IN_FLIGHT):
            self._pending.popleft()()
        self._used = True

    def finish(self) -> None:
        """Backward is over: wait until every sum is done."""
        self._used = False
        while self._pending:
            self._pending.popleft()()
