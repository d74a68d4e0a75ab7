"""torch.distributed's process group over MPI: checks the arguments, then hands an operation to the engine.

The method names are torch's, those of C++'s c10d::ProcessGroup and of torch.distributed's Python functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.distributed.distributed_c10d import Work

from hpctrain.base.torch_groups import AllgatherOptions, PythonGroup
from hpctrain.mpi.collectives.arithmetic import Reduction
from hpctrain.mpi.collectives.network import OverNetwork
from hpctrain.mpi.library import MPI
from hpctrain.mpi.process_group import BACKEND, Settings
from hpctrain.mpi.process_group.checks import (
    check_list,
    check_root,
    check_size,
    split_sizes,
    views_of,
)
from hpctrain.mpi.process_group.engine import Engine, MPIWork, Run
from hpctrain.mpi.process_group.messages import ANY_SOURCE, Messages
from hpctrain.mpi.transfer.buffers import overlap, plain, plain_like, same_memory
from hpctrain.mpi.transfer.watch import Operation, OperationWatch


class MPIProcessGroup(PythonGroup):
    """A group of ranks that communicates over one MPI communicator."""

    def __init__(
        self,
        collectives: OverNetwork,
        comm: MPI.Comm,
        watch: OperationWatch,
        settings: Settings,
        name: str,
        timeout: timedelta,
    ) -> None:
        """comm: for messages between two ranks."""
        super().__init__(collectives.rank, collectives.size)
        self._rank, self._size = collectives.rank, collectives.size
        self._collectives, self._presence = collectives, watch.presence
        self.settings = settings
        self._name = name
        self._timeout = timeout.total_seconds()
        self._engine = Engine(collectives, watch, self._presence.group)
        self._messages = Messages(comm, self._presence, self._timeout)

    # Properties that torch reads.

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
        """Finish pending operations, end the threads and free the communicator. Collective."""
        self.finish()
        self._engine.stop()
        self._messages.stop()
        if not self.broken:
            self._collectives.free()

    def finish(self) -> None:
        """Wait for all submitted operations, each within its own time limit."""
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
            raise ValueError(f"found a tensor of layout {tensors[0].layout}, expected a dense one")
        views = views_of(tensors)
        reduce = self._reduction(opts.reduceOp, views)

        def run(collectives: OverNetwork) -> None:
            in_place(views, lambda buffer: collectives.all_reduce(buffer, reduce))

        return self._submit("all_reduce", run, list(tensors), views, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions | None = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: ReduceOptions) -> Work:  # type: ignore[override]
        root = check_root(opts.rootRank, self._size)
        views = views_of(tensors)
        reduce = self._reduction(opts.reduceOp, views)

        def run(collectives: OverNetwork) -> None:
            in_place(views, lambda buffer: collectives.reduce(buffer, reduce, root), changes=self._rank == root)

        return self._submit("reduce", run, list(tensors), views, opts, meet_first=True)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions | None = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: ReduceScatterOptions | None = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        targets, inputs = views_of(outputs), views_of(tensors)
        reduce = self._reduction(opts.reduceOp, inputs)
        for target, source in zip(targets, inputs, strict=True):
            check_size("input", source, "the output", target, self._size)

        def run(collectives: OverNetwork) -> None:
            for target, source in zip(targets, inputs, strict=True):
                into_one(target, partial(collectives.reduce_scatter_single, tensor=plain(source), reduction=reduce))

        return self._submit("reduce_scatter_tensor", run, list(outputs), inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ReduceScatterOptions | None = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        targets = views_of(outputs)
        reduce = self._reduction(opts.reduceOp, targets)
        lists = [views_of(tensors) for tensors in inputs]
        for target, sources in zip(targets, lists, strict=True):
            check_list("inputs", sources, target, self._size)

        def run(collectives: OverNetwork) -> None:
            for target, sources in zip(targets, lists, strict=True):
                into_one(target, partial(_reduce_scatter, collectives, sources, reduce))

        sources = [source for tensors in lists for source in tensors]
        return self._submit("reduce_scatter", run, list(outputs), sources, opts, meet_first=True)

    def _reduction(self, op: ReduceOp | ReduceOp.RedOpType, tensors: Sequence[Tensor]) -> Reduction:
        return Reduction.of(op, tensors[0].dtype, self._size)

    # Gathers and scatters.

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: AllgatherOptions | None = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        targets, sources = views_of(outputs), views_of(tensors)
        for target, source in zip(targets, sources, strict=True):
            check_size("output", target, "the input", source, self._size)

        def run(collectives: OverNetwork) -> None:
            for target, source in zip(targets, sources, strict=True):
                into_one(target, partial(collectives.all_gather_single, tensor=plain(source)))

        return self._submit("all_gather_into_tensor", run, list(outputs), sources, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        sources, lists = views_of(tensors), [views_of(targets) for targets in outputs]
        for targets, source in zip(lists, sources, strict=True):
            check_list("outputs", targets, source, self._size, any_size=True)
            check_size("output for this rank", targets[self._rank], "the input", source, 1)
        # Every rank passes all outputs, so all ranks agree on whether the sizes differ.
        even = all(target.nbytes == targets[0].nbytes for targets in lists for target in targets)

        def run(collectives: OverNetwork) -> None:
            for targets, source in zip(lists, sources, strict=True):
                into(targets, partial(_all_gather, collectives, plain(source), even))

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
        root = check_root(opts.rootRank, self._size)
        source = views_of(tensors)[0]
        targets = views_of(outputs[0]) if self._rank == root else []
        if self._rank == root:
            check_list("outputs", targets, source, self._size)

        def run(collectives: OverNetwork) -> None:
            into(targets, lambda buffers: collectives.gather(buffers, plain(source), root))

        return self._submit("gather", run, [list(o) for o in outputs], [source], opts, meet_first=True)

    def scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ScatterOptions
    ) -> Work:
        root = check_root(opts.rootRank, self._size)
        targets = views_of(outputs)
        sources = views_of(inputs[0]) if self._rank == root else []
        if self._rank == root:
            check_list("inputs", sources, targets[0], self._size)

        def run(collectives: OverNetwork) -> None:
            into_one(targets[0], lambda b: collectives.scatter(b, [apart(plain(s), b) for s in sources], root))

        return self._submit("scatter", run, list(outputs), targets, opts, meet_first=True)

    # One to all, all to all.

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions) -> Work:  # type: ignore[override]
        root = check_root(opts.rootRank, self._size)
        views = views_of(tensors)

        def run(collectives: OverNetwork) -> None:
            in_place(views, lambda buffer: collectives.broadcast(buffer, root), changes=self._rank != root)

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
        mine, given = torch.split(target, output_sizes)[self._rank], torch.split(source, input_sizes)[self._rank]
        check_size("output for this rank", mine, "the input", given, 1)

        def run(collectives: OverNetwork) -> None:
            def move(buffer: Tensor) -> None:
                parts = torch.split(apart(plain(source), buffer), input_sizes)
                collectives.all_to_all(torch.split(buffer, output_sizes), parts, even=even)

            into_one(target, move)

        agreed = source.nbytes if even else 0
        return self._submit("all_to_all_single", run, output, [source], opts, agreed=agreed, meet_first=True)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def alltoall(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: AllToAllOptions | None = None
    ) -> Work:
        targets, sources = views_of(outputs), views_of(inputs)
        check_list("outputs", targets, sources[0], self._size, any_size=True)
        check_list("inputs", sources, targets[0], self._size, any_size=True)
        check_size("output for this rank", targets[self._rank], "the input", sources[self._rank], 1)

        def run(collectives: OverNetwork) -> None:
            def move(buffers: Sequence[Tensor]) -> None:
                parts = [plain(source) for source in sources]
                if any(overlap(part, buffer) for part in parts for buffer in buffers):
                    parts = [part.clone() for part in parts]
                collectives.all_to_all(buffers, parts, even=False)

            into(targets, move)

        return self._submit("all_to_all", run, list(outputs), sources, opts, agreed=0, meet_first=True)

    def barrier(self, opts: BarrierOptions | None = None) -> Work:  # type: ignore[override]
        return self._submit("barrier", lambda collectives: collectives.barrier(), [], [], opts)

    def allocate(self, nbytes: int) -> Tensor:
        """Zeros, (nbytes,) uint8, in memory that the group's collectives read without a copy if possible. Collective."""
        allocated: list[Tensor] = []

        def run(collectives: OverNetwork) -> None:
            allocated.append(collectives.allocate(nbytes))

        self._submit("allocate", run, None, [], None, agreed=nbytes, meet_first=True).wait()
        return allocated[0]

    # Point to point.

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work:
        return self._messages.send([plain(view) for view in views_of(tensors)], dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        return self._messages.receive(views_of(tensors), src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        return self._messages.receive(views_of(tensors), ANY_SOURCE, tag)

    def _submit(
        self,
        name: str,
        run: Run,
        result: Any,
        tensors: Sequence[Tensor],
        opts: Any,
        *,
        agreed: int | None = None,
        meet_first: bool = False,
    ) -> MPIWork:
        """tensors: this rank's input. opts: None for torch's defaults. agreed: the size that is equal on all ranks; None for that
        of `tensors`."""
        nbytes = tensors[0].nbytes if len(tensors) == 1 else sum(tensor.nbytes for tensor in tensors)
        if agreed is None:
            agreed = nbytes
        timeout = opts.timeout.total_seconds() if opts is not None else -1.0
        operation = Operation(
            name=name,
            nbytes=nbytes,
            agreed_bytes=agreed,
            dtype=tensors[0].dtype if tensors else torch.uint8,
            meet_first=meet_first,
            timeout=timeout if timeout > 0 else self._timeout,
        )
        return self._engine.submit(operation, run, result, asynchronous=opts is None or opts.asyncOp)


def apart(tensor: Tensor, buffer: Tensor) -> Tensor:
    """The tensor, or a copy of it if it shares memory with the receive buffer."""
    return tensor.clone() if overlap(tensor, buffer) else tensor


def in_place(views: Sequence[Tensor], move: Callable[[Tensor], None], changes: bool = True) -> None:
    """Move each tensor's bytes, from where they lie if they are contiguous. changes: whether others' bytes come in their place."""
    for view in views:
        buffer = plain(view)
        move(buffer)
        if changes and buffer is not view:
            view.copy_(buffer)


def into(targets: Sequence[Tensor], move: Callable[[Sequence[Tensor]], None]) -> None:
    """Receive into the targets, through temporaries where they are not contiguous."""
    buffers = [plain_like(target) for target in targets]
    move(buffers)
    for buffer, target in zip(buffers, targets, strict=True):
        if buffer is not target:
            target.copy_(buffer)


def into_one(target: Tensor, move: Callable[[Tensor], None]) -> None:
    """Receive into the target, through a temporary where it is not contiguous."""
    into([target], lambda buffers: move(buffers[0]))


def _all_gather(collectives: OverNetwork, mine: Tensor, even: bool, buffers: Sequence[Tensor]) -> None:
    if not same_memory(mine, buffers[collectives.rank]) and any(overlap(mine, buffer) for buffer in buffers):
        mine = mine.clone()
    collectives.all_gather(buffers, mine, even=even)


def _reduce_scatter(collectives: OverNetwork, sources: Sequence[Tensor], reduce: Reduction, buffer: Tensor) -> None:
    collectives.reduce_scatter(buffer, [apart(plain(source), buffer) for source in sources], reduce)
