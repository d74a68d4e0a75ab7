"""torch.distributed's process group over MPI: checks the arguments, then hands an operation to the engine.

The method names are torch's, those of C++'s c10d::ProcessGroup and of torch.distributed's Python functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import AllToAllOptions, BarrierOptions, BroadcastOptions
from torch.distributed.distributed_c10d import Work

from hpctrain.mpi.collectives.protocol import Collectives
from hpctrain.mpi.process_group.base import apart, into
from hpctrain.mpi.process_group.checks import check_list, check_own_part, check_root, outputs_of, split_sizes, views_of
from hpctrain.mpi.process_group.gathering import Gathering
from hpctrain.mpi.process_group.messages import ANY_SOURCE
from hpctrain.mpi.process_group.reductions import Reductions
from hpctrain.mpi.settings import BACKEND
from hpctrain.mpi.transfer.buffers import overlap, plain


class MPIProcessGroup(Reductions, Gathering):
    """A group of ranks that communicates over one MPI communicator."""

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

    # One to all, all to all.

    def broadcast(self, tensors: Sequence[Tensor], opts: BroadcastOptions) -> Work:  # type: ignore[override]
        root = check_root(opts.rootRank, self._size)
        is_root = self._rank == root
        views = views_of(tensors) if is_root else outputs_of(tensors)

        def run(collectives: Collectives) -> None:
            for view in views:
                buffer = plain(view)
                collectives.broadcast(buffer, root)
                if buffer is not view and not is_root:
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
        target, source = outputs_of([output])[0], views_of([tensor])[0]
        even = not output_split_sizes and not input_split_sizes
        output_sizes = split_sizes("output", target, output_split_sizes, self._size)
        input_sizes = split_sizes("input", source, input_split_sizes, self._size)
        own = self._rank
        check_own_part(torch.split(target, output_sizes)[own], torch.split(source, input_sizes)[own])

        def run(collectives: Collectives) -> None:
            def move(buffers: Sequence[Tensor]) -> None:
                parts = torch.split(apart(plain(source), buffers[0]), input_sizes)
                collectives.all_to_all(torch.split(buffers[0], output_sizes), parts, even=even)

            into([target], move)

        agreed = source.nbytes if even else 0
        return self._submit("all_to_all_single", run, output, [source], opts, agreed=agreed, meet_first=True)

    alltoall_base = all_to_all_single  # type: ignore[assignment]

    def alltoall(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: AllToAllOptions | None = None
    ) -> Work:
        targets, sources = outputs_of(outputs), views_of(inputs)
        check_list("outputs", targets, sources[0], self._size, any_size=True)
        check_list("inputs", sources, targets[0], self._size, any_size=True)
        check_own_part(targets[self._rank], sources[self._rank])

        def run(collectives: Collectives) -> None:
            def move(buffers: Sequence[Tensor]) -> None:
                parts = [plain(source) for source in sources]
                if any(overlap(part, buffer) for part in parts for buffer in buffers):
                    parts = [part.clone() for part in parts]
                collectives.all_to_all(buffers, parts, even=False)

            into(targets, move)

        return self._submit("all_to_all", run, list(outputs), sources, opts, agreed=0, meet_first=True)

    def barrier(self, opts: BarrierOptions | None = None) -> Work:  # type: ignore[override]
        return self._submit("barrier", lambda collectives: collectives.barrier(), [], [], opts or BarrierOptions())

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier. Like every operation here, it names all missing ranks when it times out."""
        opts = BarrierOptions()
        opts.asyncOp = False
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    def allocate(self, nbytes: int) -> Tensor:
        """Zeros, (nbytes,) uint8, in memory that the group's collectives read without a copy if possible. Collective."""
        allocated: list[Tensor] = []
        opts = BarrierOptions()
        opts.asyncOp = False

        def run(collectives: Collectives) -> None:
            allocated.append(collectives.allocate(nbytes))

        self._submit("allocate", run, None, [], opts, agreed=nbytes, meet_first=True).wait()
        return allocated[0]

    # Point to point.

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> Work:
        return self._messages.send([plain(view) for view in views_of(tensors)], dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> Work:
        return self._messages.receive(outputs_of(tensors), src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        return self._messages.receive(outputs_of(tensors), ANY_SOURCE, tag)
