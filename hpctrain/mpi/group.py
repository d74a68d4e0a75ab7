"""torch.distributed's process group over MPI: checks what the caller passed, then hands an operation to the engine.

The method names are torch's, those of C++'s c10d::ProcessGroup and of torch.distributed's Python functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, Work
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ProcessGroup,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from hpctrain.mpi import collectives, reduction, sparse
from hpctrain.mpi.buffers import overlap, plain, plain_like, same_memory
from hpctrain.mpi.checks import check_list, check_root, check_size, split_sizes, views_of
from hpctrain.mpi.engine import Engine
from hpctrain.mpi.operation import Operation
from hpctrain.mpi.point_to_point import ANY_SOURCE, Messages
from hpctrain.mpi.reduction import Reduction
from hpctrain.mpi.transport import Transport
from hpctrain.mpi.work import MPIWork

BACKEND = "mpi4py"


class MPIProcessGroup(ProcessGroup):
    """A group of ranks that communicates over one MPI communicator."""

    def __init__(self, transport: Transport, name: str, timeout: timedelta) -> None:
        super().__init__(transport.rank, transport.size)  # type: ignore[call-arg]
        self._transport, self._size = transport, transport.size
        self._presence = transport.watch.presence
        self._name = name
        self._timeout = timeout.total_seconds()
        self._engine = Engine(transport, self._presence.group)
        self._messages = Messages(transport.network.comm, self._presence, self._timeout)

    # What torch asks a group.

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return BACKEND

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    @property
    def group_desc(self) -> str:
        return self._presence.group

    def set_timeout(self, timeout: timedelta) -> None:
        """The time limit, from now on, of each operation of this group."""
        self._timeout = timeout.total_seconds()
        self._messages.timeout = self._timeout

    def shutdown(self) -> None:
        """Finish what is under way, end the threads and free the communicator. Collective."""
        self.finish()
        self._engine.stop()
        self._messages.stop()
        if not self.broken:
            self._transport.free()

    def finish(self) -> None:
        """Wait for everything that was submitted, each operation within its own time limit."""
        self._engine.drain()
        self._messages.drain()

    @property
    def broken(self) -> bool:
        """Whether MPI still holds an operation that this process has given up."""
        return self._engine.broken is not None or self._engine.abandoned or self._messages.broken is not None

    # Reductions.

    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions | None = None) -> Work:  # type: ignore[override]
        opts = opts or AllreduceOptions()
        if tensors[0].layout != torch.strided:
            return self._sparse_all_reduce(tensors, opts)
        reduce, views = self._reduction(opts.reduceOp, tensors)

        def run(transport: Transport) -> None:
            for view in views:
                buffer = plain(view)
                transport.all_reduce(buffer, reduce)
                if buffer is not view:
                    view.copy_(buffer)

        return self._submit("all_reduce", run, list(tensors), views, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions | None = None) -> Work:
        return self.allreduce(tensors, opts or AllreduceCoalescedOptions())

    def _sparse_all_reduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions) -> Work:
        views = views_of(tensors)
        for view in views:
            sparse.check(view, opts.reduceOp)

        def run(transport: Transport) -> None:
            for view in views:
                sparse.all_reduce(transport.network, view, opts.reduceOp)

        nbytes = sum(view._values().nbytes + view._indices().nbytes for view in views)
        return self._submit("sparse_all_reduce", run, list(tensors), views, opts, nbytes=nbytes, agreed=0)

    def reduce(self, tensors: Sequence[Tensor], opts: ReduceOptions) -> Work:  # type: ignore[override]
        reduce, views = self._reduction(opts.reduceOp, tensors)
        root = self._root(opts.rootRank)

        def run(transport: Transport) -> None:
            for view in views:
                buffer = plain(view)
                reduction.reduce(transport.network, buffer, reduce, root)
                if buffer is not view and transport.rank == root:
                    view.copy_(buffer)

        return self._submit("reduce", run, list(tensors), views, opts, meet_first=True)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions | None = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: ReduceScatterOptions | None = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        reduce, inputs = self._reduction(opts.reduceOp, tensors)
        targets = views_of(outputs)
        for target, source in zip(targets, inputs, strict=True):
            check_size("input", source, "the output", target, self._size)

        def run(transport: Transport) -> None:
            for target, source in zip(targets, inputs, strict=True):
                buffer = plain_like(target)
                transport.reduce_scatter_single(buffer, plain(source), reduce)
                if buffer is not target:
                    target.copy_(buffer)

        return self._submit("reduce_scatter_tensor", run, list(outputs), inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ReduceScatterOptions | None = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        targets = views_of(outputs)
        reduce, _ = self._reduction(opts.reduceOp, outputs)
        lists = [views_of(tensors) for tensors in inputs]
        for target, sources in zip(targets, lists, strict=True):
            check_list("inputs", sources, target, self._size)

        def run(transport: Transport) -> None:
            for target, sources in zip(targets, lists, strict=True):
                buffer = plain_like(target)
                parts = [_apart(plain(source), buffer) for source in sources]
                transport.reduce_scatter(buffer, parts, reduce)
                if buffer is not target:
                    target.copy_(buffer)

        sources = [source for tensors in lists for source in tensors]
        return self._submit("reduce_scatter", run, list(outputs), sources, opts, meet_first=True)

    # Gathering.

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: AllgatherOptions | None = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single  # type: ignore[assignment]

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        targets, sources = views_of(outputs), views_of(tensors)
        for target, source in zip(targets, sources, strict=True):
            check_size("output", target, "the input", source, self._size)

        def run(transport: Transport) -> None:
            for target, source in zip(targets, sources, strict=True):
                buffer = plain_like(target)
                transport.all_gather_single(buffer, plain(source))
                if buffer is not target:
                    target.copy_(buffer)

        return self._submit("all_gather_into_tensor", run, list(outputs), sources, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        sources, lists = views_of(tensors), [views_of(targets) for targets in outputs]
        for targets, source in zip(lists, sources, strict=True):
            check_list("outputs", targets, source, self._size, any_size=True)
            check_size("output for this rank", targets[self._transport.rank], "the input", source, 1)
        # Every rank passes all outputs, so all ranks see alike whether the sizes differ.
        even = all(target.nbytes == targets[0].nbytes for targets in lists for target in targets)

        def run(transport: Transport) -> None:
            for targets, source in zip(lists, sources, strict=True):
                _into(targets, partial(_all_gather, transport, plain(source), even))

        result = [list(targets) for targets in outputs]
        agreed = None if even else 0
        return self._submit("all_gather", run, result, sources, opts, agreed=agreed, meet_first=not even)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        # torch's lists are per rank here, per tensor in allgather.
        return self.allgather(list(zip(*outputs, strict=True)), tensors, opts)

    def gather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: GatherOptions
    ) -> Work:
        root = self._root(opts.rootRank)
        source = views_of(tensors)[0]
        targets = views_of(outputs[0]) if self._transport.rank == root else []
        if self._transport.rank == root:
            check_list("outputs", targets, source, self._size)

        def run(transport: Transport) -> None:
            _into(targets, lambda buffers: collectives.gather(transport.network, buffers, plain(source), root))

        return self._submit("gather", run, [list(o) for o in outputs], [source], opts, meet_first=True)

    def scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ScatterOptions
    ) -> Work:
        root = self._root(opts.rootRank)
        targets = views_of(outputs)
        sources = views_of(inputs[0]) if self._transport.rank == root else []
        if self._transport.rank == root:
            check_list("inputs", sources, targets[0], self._size)

        def run(transport: Transport) -> None:
            _into(
                targets,
                lambda b: collectives.scatter(transport.network, b[0], [_apart(plain(s), b[0]) for s in sources], root),
            )

        return self._submit("scatter", run, list(outputs), targets, opts, meet_first=True)

    # One to all, all to all.

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions) -> Work:  # type: ignore[override]
        root = self._root(opts.rootRank)
        views = views_of(tensors)

        def run(transport: Transport) -> None:
            for view in views:
                buffer = plain(view)
                transport.broadcast(buffer, root)
                if buffer is not view:
                    view.copy_(buffer)

        return self._submit("broadcast", run, list(tensors), views, opts)

    def all_to_all_single(  # type: ignore[override]
        self,
        output: Tensor,
        tensor: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: AllToAllOptions | None = None,
    ) -> Work:
        target, source = views_of([output])[0], views_of([tensor])[0]
        even = not output_split_sizes and not input_split_sizes
        output_sizes = split_sizes("output", target, output_split_sizes, self._size)
        input_sizes = split_sizes("input", source, input_split_sizes, self._size)

        def run(transport: Transport) -> None:
            def move(buffers: Sequence[Tensor]) -> None:
                parts = torch.split(_apart(plain(source), buffers[0]), input_sizes)
                transport.all_to_all(torch.split(buffers[0], output_sizes), parts, even=even)

            _into([target], move)

        agreed = source.nbytes if even else 0
        return self._submit("all_to_all_single", run, output, [source], opts, agreed=agreed, meet_first=True)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def alltoall(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: AllToAllOptions | None = None
    ) -> Work:
        targets, sources = views_of(outputs), views_of(inputs)
        check_list("outputs", targets, sources[0], self._size, any_size=True)
        check_list("inputs", sources, targets[0], self._size, any_size=True)

        def run(transport: Transport) -> None:
            def move(buffers: Sequence[Tensor]) -> None:
                parts = [plain(source) for source in sources]
                if any(overlap(part, buffer) for part in parts for buffer in buffers):
                    parts = [part.clone() for part in parts]
                transport.all_to_all(buffers, parts, even=False)

            _into(targets, move)

        return self._submit("all_to_all", run, list(outputs), sources, opts, agreed=0, meet_first=True)

    def barrier(self, opts: BarrierOptions | None = None) -> Work:  # type: ignore[override]
        return self._submit("barrier", Transport.barrier, [], [], opts or BarrierOptions())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier; like every operation here, it names all ranks that are missing when the time is up."""
        opts = BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    def allocate(self, nbytes: int) -> Tensor:
        """Zeros, (nbytes,) uint8, that this group's collectives need not copy to reach the other ranks. Collective."""
        allocated: list[Tensor] = []
        opts = BarrierOptions()
        opts.asyncOp = False

        def run(transport: Transport) -> None:
            allocated.append(transport.allocate(nbytes))

        self._submit("allocate", run, None, [], opts, agreed=nbytes, meet_first=True).wait()
        return allocated[0]

    # Point to point.

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work:
        return self._messages.send([plain(view) for view in views_of(tensors)], dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        return self._messages.receive(views_of(tensors), src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        return self._messages.receive(views_of(tensors), ANY_SOURCE, tag)

    # Checks, and the way to the engine.

    def _submit(
        self,
        name: str,
        run: Callable[[Transport], None],
        result: Any,
        tensors: Sequence[Tensor],
        opts: Any,
        *,
        nbytes: int | None = None,
        agreed: int | None = None,
        meet_first: bool = False,
    ) -> MPIWork:
        """tensors: what this rank puts in. agreed: the size that all ranks must have, None for that of `tensors`."""
        if nbytes is None:
            nbytes = tensors[0].nbytes if len(tensors) == 1 else sum(tensor.nbytes for tensor in tensors)
        if agreed is None:
            agreed = nbytes
        timeout = opts.timeout.total_seconds() if opts is not None else -1.0
        operation = Operation(
            name=name,
            run=run,
            result=result,
            nbytes=nbytes,
            agreed_bytes=agreed,
            dtype=tensors[0].dtype if tensors else torch.uint8,
            meet_first=meet_first or name == "sparse_all_reduce",
            timeout=timeout if timeout > 0 else self._timeout,
        )
        return self._engine.submit(operation, asynchronous=opts is None or opts.asyncOp)

    def _reduction(self, op: ReduceOp, tensors: Sequence[Tensor]) -> tuple[Reduction, list[Tensor]]:
        views = views_of(tensors)
        return Reduction.of(op, views[0].dtype, self._size), views

    def _root(self, rank: int) -> int:
        return check_root(rank, self._size)


def _apart(tensor: Tensor, buffer: Tensor) -> Tensor:
    """The tensor, or a copy of it if it shares memory with the buffer that is received into."""
    return tensor.clone() if overlap(tensor, buffer) else tensor


def _into(targets: Sequence[Tensor], move: Callable[[Sequence[Tensor]], None]) -> None:
    """Receive into the targets, by way of temporaries where they are not contiguous."""
    buffers = [plain_like(target) for target in targets]
    move(buffers)
    for buffer, target in zip(buffers, targets, strict=True):
        if buffer is not target:
            target.copy_(buffer)


def _all_gather(transport: Transport, mine: Tensor, even: bool, buffers: Sequence[Tensor]) -> None:
    if not same_memory(mine, buffers[transport.rank]) and any(overlap(mine, buffer) for buffer in buffers):
        mine = mine.clone()
    transport.all_gather(buffers, mine, even=even)
