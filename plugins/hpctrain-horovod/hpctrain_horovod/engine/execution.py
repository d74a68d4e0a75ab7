"""Runs agreed operations: packs small tensors together, moves the data, scales, and puts the results where they belong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.torch_private import foreach_copy_
from hpctrain_horovod.engine import request as kinds
from hpctrain_horovod.engine.arithmetic import adasum, scale
from hpctrain_horovod.engine.lane import Lane
from hpctrain_horovod.engine.negotiation import Agreed
from hpctrain_horovod.engine.request import Request
from hpctrain_horovod.engine.submission import Submission

Batch = list[Agreed]
_LARGE = 2**20
"""Bytes from which a tensor is reduced in place: copying it into a common buffer and back takes longer than an operation saves."""


def fused(together: Sequence[Agreed], fusion_bytes: int) -> Iterator[Batch]:
    """The agreed operations in batches that run as one: allreduces that differ only in name and shape, up to `fusion_bytes`.

    All ranks have the same list and make the same batches.
    """
    batches: dict[Request, Batch] = {}
    filled: dict[Request, int] = {}
    for one in together:
        alike, nbytes = _fusible(one.request)
        if alike is None or one.error is not None:
            yield from batches.values()  # keeps the order that rank 0 announced
            batches.clear()
            filled.clear()
            yield [one]
            continue
        if alike in batches and filled[alike] + nbytes > fusion_bytes:
            yield batches.pop(alike)
        if alike not in batches:
            batches[alike], filled[alike] = [], 0
        batches[alike].append(one)
        filled[alike] += nbytes
    yield from batches.values()


@lru_cache(maxsize=8192)
def _fusible(request: Request) -> tuple[Request | None, int]:
    """The common part of requests that may run as one, and the bytes of the tensor; None if the request runs alone."""
    nbytes = elements_of(request) * dtype_of(request).itemsize if request.dtype else 0
    alone = request.kind != kinds.ALLREDUCE or request.op == "Adasum" or nbytes > _LARGE
    return None if alone else request._replace(name="", shape=()), nbytes


def run(batch: Batch, mine: Sequence[Submission | None], lane: Lane, buffers: Buffers) -> list[Any]:
    """Run one batch. mine: this rank's submissions; None stands for zeros, because it has joined. Returns the results."""
    if batch[0].request.kind == kinds.ALLREDUCE:
        return _all_reduce(batch, mine, lane, buffers)
    [submission] = mine
    assert submission is not None  # a rank that has joined takes part in allreduces and barriers only
    return [_RUNS[batch[0].request.kind](batch[0], submission, lane)]


class Buffers:
    """The memory in which small tensors are sent together, one for each dtype and kind of device."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, str], Tensor] = {}

    def take(self, elements: int, like: Tensor) -> Tensor:
        """Memory for (elements,) of the dtype and device of `like`."""
        key = like.dtype, str(like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < elements:
            buffer = self._buffers[key] = like.new_empty(elements)
        return buffer[:elements]


def dtype_of(request: Request) -> torch.dtype:
    """The tensors' data type."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    return dtype


def elements_of(request: Request) -> int:
    """The elements of a tensor."""
    return torch.Size(request.shape).numel()


def _all_reduce(batch: Batch, mine: Sequence[Submission | None], lane: Lane, buffers: Buffers) -> list[Any]:
    request = batch[0].request
    tensors = [
        torch.zeros(one.request.shape, dtype=dtype_of(request), device=request.device)
        if submission is None or submission.tensor is None
        else submission.tensor
        for one, submission in zip(batch, mine, strict=True)
    ]
    outputs = [
        submission.output if submission is not None and submission.output is not None else tensor
        for submission, tensor in zip(mine, tensors, strict=True)
    ]
    if len(batch) == 1:
        if outputs[0] is not tensors[0]:
            outputs[0].copy_(tensors[0])
        _reduce(outputs[0].view(-1), request, lane)
        return list(outputs)
    sizes = [tensor.numel() for tensor in tensors]
    buffer = buffers.take(sum(sizes), tensors[0])
    torch.cat([tensor.view(-1) for tensor in tensors], out=buffer)
    _reduce(buffer, request, lane)
    foreach_copy_([output.view(-1) for output in outputs], list(buffer.split(sizes)))
    return list(outputs)


def _reduce(buffer: Tensor, request: Request, lane: Lane) -> None:
    scale(buffer, request.prescale)
    if request.op == "Adasum":
        buffer.copy_(adasum(buffer, lane.rank, lane.size, lane.exchange))
        scale(buffer, request.postscale)
    elif request.op == "Average" and not buffer.is_floating_point():
        lane.all_reduce(buffer, "Sum")
        scale(buffer, request.postscale, lane.size)
    else:
        lane.all_reduce(buffer, request.op)
        scale(buffer, request.postscale)


def _input(submission: Submission) -> Tensor:
    assert submission.tensor is not None  # every kind below moves a tensor
    return submission.tensor


def _all_gather(agreed: Agreed, submission: Submission, lane: Lane) -> Tensor:
    tensor = _input(submission)
    rows = [int(agreed.values[rank]) for rank in range(lane.size)]
    output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
    if output.numel():
        lane.all_gather(output.split(rows), tensor)
    return output


def _broadcast(agreed: Agreed, submission: Submission, lane: Lane) -> Tensor:
    tensor, output = _input(submission), submission.output
    assert output is not None  # of the tensor's shape
    if output is not tensor and lane.rank == agreed.request.root:
        output.copy_(tensor)
    if output.numel():
        lane.broadcast(output, agreed.request.root)
    return output


def _all_to_all(agreed: Agreed, submission: Submission, lane: Lane) -> tuple[Tensor, Tensor]:
    tensor, size = _input(submission), lane.size
    splits = torch.tensor(submission.splits, dtype=torch.int32, device=tensor.device)
    received = torch.empty_like(splits)
    lane.all_to_all(received, splits, [1] * size, [1] * size)
    rows = torch.Size(tensor.shape[1:]).numel()
    counts = received.tolist()
    output = tensor.new_empty((sum(counts), *tensor.shape[1:]))
    lane.all_to_all(
        output.view(-1), tensor.reshape(-1), [n * rows for n in counts], [n * rows for n in splits.tolist()]
    )
    return output, received.cpu()


def _reduce_scatter(agreed: Agreed, submission: Submission, lane: Lane) -> Tensor:
    """The first ranks get one row more where the rows do not divide; parts travel padded to equal size."""
    tensor, request = _input(submission), agreed.request
    rows, size = tensor.shape[0], lane.size
    counts = [rows // size + (rank < rows % size) for rank in range(size)]
    padded = tensor.new_zeros((size, max(counts), *tensor.shape[1:]))
    for part, given in zip(padded, tensor.split(counts), strict=True):
        part[: len(given)].copy_(given)
    scale(padded, request.prescale)
    output = tensor.new_empty((max(counts), *tensor.shape[1:]))
    average = request.op == "Average" and tensor.is_floating_point()
    if output.numel():
        lane.reduce_scatter(output.view(-1), padded.view(-1), "Average" if average else "Sum")
    scale(output, request.postscale, size if request.op == "Average" and not average else 1)
    return output[: counts[lane.rank]].clone()


_RUNS: dict[str, Callable[[Agreed, Submission, Lane], Any]] = {
    kinds.ALLGATHER: _all_gather,
    kinds.BROADCAST: _broadcast,
    kinds.ALLTOALL: _all_to_all,
    kinds.REDUCESCATTER: _reduce_scatter,
}
