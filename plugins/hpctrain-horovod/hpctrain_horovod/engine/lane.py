"""Moves the data of agreed operations, through a process group of torch's interface: hpctrain.mpi's, gloo's or an accelerator's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceOptions,
    AllToAllOptions,
    Backend,
    BroadcastOptions,
    ProcessGroup,
    ReduceOp,
    ReduceScatterOptions,
)
from torch.distributed.distributed_c10d import PrefixStore, Work

from hpctrain.base.torch_groups import AllgatherOptions, group_around, make_backend

_OPERATIONS: dict[str, Any] = {
    "Sum": ReduceOp.SUM,
    "Min": ReduceOp.MIN,
    "Max": ReduceOp.MAX,
    "Product": ReduceOp.PRODUCT,
    "Average": ReduceOp.AVG,
}


def accelerator_group(device: torch.device, options: Any) -> ProcessGroup:
    """The group that torch makes by default for tensors on this kind of device: NCCL's on NVIDIA's and AMD's, XCCL's on Intel's.

    options: an object with torch's `store` (it is replaced), `group_rank`, `group_size`, `global_ranks_in_group`, `group_id` and
    `timeout`. Collective. Raises OSError where torch has none.
    """
    name = Backend.default_device_backend_map.get(device.type)
    if name is None:
        raise OSError(f"found tensors on {device.type}, between which torch has no communication")
    options.store = PrefixStore(f"{name}/", options.store)
    made = make_backend(name, options, device)
    if isinstance(made, ProcessGroup):
        return made
    return group_around(made, options, Backend.backend_type_map[name], [device.type])


class Lane:
    """The data path of one process set and one kind of device. All ranks call the same methods in the same order.

    averages: the group rounds an average of 16-bit floats once, from float32; a sum of them could overflow before it is
    divided.
    """

    def __init__(self, group: ProcessGroup, rank: int, size: int, *, averages: bool) -> None:
        self._group, self._averages = group, averages
        self.rank, self.size = rank, size

    def abort(self) -> None:
        """End what runs and the connections, so that a rank that waits for this one notices."""
        self._group.abort()

    def close(self) -> None:
        """Abort, and free the connections' resources."""
        self.abort()
        del self._group  # gloo's abort does nothing: only the group's end closes its sockets

    def all_reduce(self, buffer: Tensor, op: str) -> None:
        """Reduce in place. Average is for floating-point buffers."""
        if self.size == 1:
            return
        options = AllreduceOptions()
        options.asyncOp = False
        options.reduceOp = self._operation(op)
        _finish(self._group.allreduce([buffer], options))
        self._divide(buffer, op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        """Gather each rank's `tensor` into `outputs[rank]`; their sizes may differ."""
        options = AllgatherOptions()
        options.asyncOp = False
        _finish(self._group.allgather([list(outputs)], [tensor], options))

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str) -> None:
        """Reduce `tensor`, a part of the output's size for each rank; `output` gets this rank's. op: Sum or Average."""
        options = ReduceScatterOptions()
        options.asyncOp = False
        options.reduceOp = self._operation(op)
        _finish(self._group.reduce_scatter_single(output, tensor, options))
        self._divide(output, op)

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Copy the root's tensor to all ranks, in place."""
        options = BroadcastOptions()
        options.rootRank, options.asyncOp = root, False
        if self.size > 1:
            _finish(self._group.broadcast([tensor], options))

    def all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        """Send `sent[r]` elements to rank r, receive `received[r]` from it; both buffers are flat."""
        options = AllToAllOptions()
        options.asyncOp = False
        _finish(self._group.alltoall_base(output, tensor, received, sent, options))

    def exchange(self, tensor: Tensor, peer: int) -> Tensor:
        """The peer's flat tensor of the same size, in exchange for this rank's. Every rank has a peer."""
        counts = [tensor.numel() if rank == peer else 0 for rank in range(self.size)]
        output = torch.empty_like(tensor)
        self.all_to_all(output, tensor, counts, counts)
        return output

    def _operation(self, op: str) -> Any:
        return _OPERATIONS["Sum" if op == "Average" and not self._averages else op]

    def _divide(self, result: Tensor, op: str) -> None:
        if op == "Average" and not self._averages:
            result.div_(self.size)


class GlooLane(Lane):
    """Gloo gathers only tensors of one size, has no averages, and takes few of the 8- and 16-bit types."""

    def all_reduce(self, buffer: Tensor, op: str) -> None:
        wide = buffer.float() if buffer.dtype in (torch.float16, torch.bfloat16) else buffer
        super().all_reduce(wide, op)
        if wide is not buffer:
            buffer.copy_(wide)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor) -> None:
        most = max(output.numel() for output in outputs) * tensor.itemsize
        sent = torch.zeros(most, dtype=torch.uint8)
        sent[: tensor.nbytes].copy_(_bytes(tensor))
        received = [torch.empty_like(sent) for _ in outputs]
        super().all_gather(received, sent)
        for output, part in zip(outputs, received, strict=True):
            _bytes(output).copy_(part[: output.nbytes])

    def broadcast(self, tensor: Tensor, root: int) -> None:
        super().broadcast(_bytes(tensor), root)

    def all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        width = tensor.itemsize
        super().all_to_all(_bytes(output), _bytes(tensor), [n * width for n in received], [n * width for n in sent])

    def reduce_scatter(self, output: Tensor, tensor: Tensor, op: str) -> None:
        whole = tensor.clone()
        self.all_reduce(whole, op)
        output.copy_(whole[self.rank * output.numel() :][: output.numel()])


def _finish(work: Work | None) -> None:
    """Wait for an operation; NCCL gives none for a synchronous one, which the device's stream orders."""
    if work is not None:
        work.wait()


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor, (bytes,)."""
    return tensor.view(-1).view(torch.uint8)
