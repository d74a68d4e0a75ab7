"""Horovod's operations on tensors, under their usual names.

Those without `_async` wait for the result, and autograd differentiates them unless they end in `_` (in place). `process_set`
limits an operation to a set's ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain_horovod.common.exceptions import HorovodInternalError
from hpctrain_horovod.common.process_sets import ProcessSet, global_process_set
from hpctrain_horovod.common.util import cuda_built, gloo_built, mpi_built, nccl_built
from hpctrain_horovod.common.util import no_such_build as ccl_built
from hpctrain_horovod.common.util import no_such_build as ddl_built
from hpctrain_horovod.common.util import no_such_build as rocm_built
from hpctrain_horovod.torch.basics import (
    cross_rank,
    cross_size,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_enabled,
    mpi_threads_supported,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from hpctrain_horovod.torch.compression import Compression, Compressor
from hpctrain_horovod.torch.differentiable import Broadcast, Exchanged, Gathered, Reduced, Scattered, apply
from hpctrain_horovod.torch.operations import (
    Adasum,
    Average,
    Max,
    Min,
    Product,
    Scales,
    Sum,
    alltoall_async,
    barrier,
    broadcast_into_async,
    gather_async,
    join,
    operation_of,
    poll,
    reduce_async,
    scatter_async,
    synchronize,
)

__all__ = [
    "Adasum", "Average", "HorovodInternalError", "Max", "Min", "Product", "Sum", "allgather", "allgather_async", "allreduce",
    "allreduce_", "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "gloo_built",
    "gloo_enabled", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "init",
    "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "poll", "rank", "reducescatter", "reducescatter_async", "rocm_built", "shutdown",
    "size", "sparse_allreduce_async", "start_timeline", "stop_timeline", "synchronize",
]  # fmt: skip

World = global_process_set


def allreduce(
    tensor: Tensor, average: bool | None = None, name: str | None = None, compression: type[Compressor] = Compression.none,
    op: int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = World,
) -> Tensor:  # fmt: skip
    """The tensor reduced over the ranks, as a new tensor of the same shape."""
    return grouped_reduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set, False
    )[0]


def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None,
    compression: type[Compressor] = Compression.none, op: int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = World,
) -> list[Tensor]:  # fmt: skip
    """The tensors, reduced together."""
    return grouped_reduce(tensors, average, name, compression, op, prescale_factor, postscale_factor, process_set, True)


def grouped_reduce(
    tensors: Sequence[Tensor], average: bool | None, name: str | None, compression: type[Compressor], op: int | None,
    prescale_factor: float, postscale_factor: float, process_set: ProcessSet, grouped: bool,
) -> list[Tensor]:  # fmt: skip
    """Compress, reduce, decompress."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    scales = Scales(prescale_factor, postscale_factor)
    found = apply(Reduced, name, operation_of(op, average), scales, process_set, grouped, *(pair[0] for pair in pairs))
    return [compression.decompress(one, context) for one, (_, context) in zip(found, pairs, strict=True)]


def allreduce_async(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = World,
) -> int:  # fmt: skip
    """A handle for the reduced tensor."""
    scales = Scales(prescale_factor, postscale_factor)
    output = torch.empty_like(tensor)
    return reduce_async([tensor], [output], name, operation_of(op, average), scales, process_set, lambda _: output)


def allreduce_async_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = World,
) -> int:  # fmt: skip
    """A handle for the tensor, reduced in place."""
    scales = Scales(prescale_factor, postscale_factor)
    return reduce_async([tensor], [tensor], name, operation_of(op, average), scales, process_set, lambda _: tensor)


def allreduce_(
    tensor: Tensor, average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = World,
) -> Tensor:  # fmt: skip
    """The tensor, reduced in place."""
    scales = Scales(prescale_factor, postscale_factor)
    op = operation_of(op, average)
    synchronize(reduce_async([tensor], [tensor], name, op, scales, process_set, lambda _: tensor, waits=True))
    return tensor


def grouped_allreduce_async(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = World,
) -> int:  # fmt: skip
    """A handle for the tuple of the reduced tensors."""
    scales = Scales(prescale_factor, postscale_factor)
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    op = operation_of(op, average)
    return reduce_async(tensors, outputs, name, op, scales, process_set, lambda _: tuple(outputs), grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = World,
) -> int:  # fmt: skip
    """A handle for the tuple of the tensors, reduced in place."""
    scales = Scales(prescale_factor, postscale_factor)
    op = operation_of(op, average)
    return reduce_async(tensors, tensors, name, op, scales, process_set, lambda _: tuple(tensors), grouped=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor], average: bool | None = None, name: str | None = None, op: int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = World,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The tensors, reduced in place."""
    synchronize(grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set))
    return tuple(tensors)


def sparse_allreduce_async(tensor: Tensor, name: str, op: int, process_set: ProcessSet = World) -> Callable[[], Tensor]:
    """Sum or average a sparse COO tensor, (sparse dims..., dense dims...). Call what it returns for the result."""
    if op not in (Average, Sum):
        raise ValueError("found a sparse allreduce with another op, expected hvd.Average or hvd.Sum")
    given = tensor if tensor.is_coalesced() else tensor.coalesce()
    indices = allgather_async(given.indices().t().contiguous(), f"{name}.indices", process_set)
    values = allgather_async(given.values().contiguous(), f"{name}.values", process_set)

    def result() -> Tensor:
        places, found = synchronize(indices), synchronize(values)
        if op == Average:
            found = found / process_set.size()
        return torch.sparse_coo_tensor(places.t(), found, tensor.size(), check_invariants=False).coalesce()

    return result


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = World) -> Tensor:
    """The ranks' tensors, concatenated along the first dim, in which they may differ."""
    found: Tensor = apply(Gathered, name, process_set, False, tensor)[0]
    return found


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = World) -> int:
    """A handle for the gathered tensor."""
    return gather_async([tensor], name, process_set, lambda found: found[0])


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = World
) -> tuple[Tensor, ...]:
    """The tensors, gathered together."""
    found: tuple[Tensor, ...] = apply(Gathered, name, process_set, True, *tensors)
    return found


def grouped_allgather_async(tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = World) -> int:
    """A handle for the tuple of the gathered tensors."""
    return gather_async(tensors, name, process_set, tuple, grouped=True)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = World) -> Tensor:
    """The root's tensor."""
    found: Tensor = apply(Broadcast, tensor, root_rank, name, process_set)
    return found


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = World) -> Tensor:
    """The tensor, with the root's values."""
    synchronize(broadcast_into_async(tensor, tensor, root_rank, name, process_set, waits=True))
    return tensor


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = World) -> int:
    """A handle for the root's tensor."""
    return broadcast_into_async(tensor, torch.empty_like(tensor), root_rank, name, process_set)


def broadcast_async_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = World) -> int:
    """A handle for the tensor, with the root's values."""
    return broadcast_into_async(tensor, tensor, root_rank, name, process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = World,
) -> Any:
    """The rows that the ranks sent to this one; with `splits`, also how many came from each rank."""
    output, received = apply(Exchanged, tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def reducescatter(
    tensor: Tensor, name: str | None = None, compression: type[Compressor] = Compression.none, op: int = Average,
    process_set: ProcessSet = World, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """This rank's rows of the reduced tensor; the first ranks get one more where the rows do not divide."""
    compressed, context = compression.compress(tensor)
    scales = Scales(prescale_factor, postscale_factor)
    return compression.decompress(apply(Scattered, name, op, scales, process_set, False, compressed)[0], context)


def reducescatter_async(
    tensor: Tensor, name: str | None = None, op: int = Average, process_set: ProcessSet = World,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """A handle for this rank's rows of the reduced tensor."""
    scales = Scales(prescale_factor, postscale_factor)
    return scatter_async([tensor], name, op, scales, process_set, lambda found: found[0])


def grouped_reducescatter(
    tensors: Sequence[Tensor], name: str | None = None, compression: type[Compressor] = Compression.none, op: int = Average,
    process_set: ProcessSet = World, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Tensor]:  # fmt: skip
    """This rank's rows of each reduced tensor."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    scales = Scales(prescale_factor, postscale_factor)
    found = apply(Scattered, name, op, scales, process_set, True, *(pair[0] for pair in pairs))
    return [compression.decompress(one, context) for one, (_, context) in zip(found, pairs, strict=True)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor], name: str | None = None, op: int = Average, process_set: ProcessSet = World,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:  # fmt: skip
    """A handle for the tuple of this rank's rows of each reduced tensor."""
    scales = Scales(prescale_factor, postscale_factor)
    return scatter_async(tensors, name, op, scales, process_set, tuple, grouped=True)
