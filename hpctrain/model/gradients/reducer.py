"""The sums of gradient buckets that a sharding strategy asks for (contracts/buckets.py), compressed as the job says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.devices import is_accelerator
from hpctrain.base.side_stream import SideStream
from hpctrain.base.torch_private import foreach_copy_
from hpctrain.contracts.buckets import BucketSum, Finish, GradientBucket
from hpctrain.contracts.compression import Compression, Compressor, LossyCompression
from hpctrain.contracts.pieces import Piece
from hpctrain.model.gradients.routes import Routes, find_routes
from hpctrain.model.mesh import Meshes


class WholeSum:
    """The communicator's own sum."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def all_reduce(self, gradients: Tensor) -> Finish:
        work = dist.all_reduce(gradients, group=self._group, async_op=True)
        return partial(_wait, work)

    def reduce_scatter(self, output: Tensor, gradients: Tensor) -> Finish:
        work = dist.reduce_scatter_single(output, gradients, group=self._group, async_op=True)
        return partial(_wait, work)


class GradientReducer:
    """Makes the sums of a job, and keeps what their compression remembers. One per rank."""

    def __init__(self, compression: Compression, meshes: Meshes, node: str) -> None:
        """`node` is this rank's; collective over the world."""
        axes = meshes.data_axes
        self.group = meshes.group
        self._groups = {axis: meshes.model[axis].get_group() for axis in axes}
        # the outer one: hybrid sharding is for nodes that shard among their own ranks
        self._axis = next((axis for axis in axes if self._groups[axis].size() > 1), axes[-1])
        self._lossy = compression if isinstance(compression, LossyCompression) else None
        self._routes = self._find_routes(node)
        self._aside = _Aside(torch.device(meshes.model.device_type))
        self._buckets = 0
        self._compressors: list[Compressor] = []
        self._kept: list[Tensor] = []
        self.step, self.scale = 0, 1.0

    def _find_routes(self, node: str) -> Routes | None:
        if self._lossy is None:
            return None
        return find_routes(self._groups[self._axis], node, self._lossy.options.inside_nodes)

    def bucket(self, content: GradientBucket, axis: str) -> BucketSum:
        """The sum of such a bucket over `axis`; the same buckets in the same order on all its ranks."""
        group = self.group(axis, content.spans[0].piece.axes if content.spans else ())
        goes_elsewhere = axis != self._axis or group is not self._groups[axis]
        if self._routes is None or self._lossy is None or goes_elsewhere or content.dtype.is_complex:
            return WholeSum(group)  # complex gradients travel in full: compressors know real numbers
        number, self._buckets = self._buckets, self._buckets + 1
        compressor = None
        if self._routes.leader(number) == dist.get_rank():
            between = self._routes.between[number % len(self._routes.between)]
            assert between is not None  # a leader is in it
            compressor = self._lossy.compressor(content, between)
            self._compressors.append(compressor)
        return _CompressedSum(self._groups[axis], self, self._routes, self._routes.leader(number), compressor)

    def begin(self, step: int, scale: float, may_be_left_out: bool) -> None:
        """A step begins, counted from 0; its gradients come multiplied by `scale`."""
        self.step, self.scale = step, scale
        live = self._state()
        if may_be_left_out and live:
            if not self._kept:
                self._kept = [torch.empty_like(tensor) for tensor in live]
            foreach_copy_(self._kept, live)

    def leave_out(self) -> None:
        """The step that `begin` said may be left out changes nothing."""
        if self._kept:
            foreach_copy_(self._state(), self._kept)

    def _state(self) -> list[Tensor]:
        return [tensor for one in self._compressors for tensor in one.state()]

    def consolidate(self) -> None:
        """Bring what compression remembers into the form that `pieces` gives; collective."""
        for compressor in self._compressors:
            compressor.consolidate()

    def pieces(self) -> list[Piece]:
        """The pieces that compression remembers: see Compressor.pieces."""
        return [piece for one in self._compressors for piece in one.pieces()]

    @property
    def starts_whole(self) -> bool:
        """Whether this step's gradients travel whole."""
        return self._lossy is not None and self.step < self._lossy.options.start_step

    def run(self, job: Finish) -> Finish:
        """Run `job` after those before it; what is returned waits for it."""
        return self._aside.run(job)

    def close(self) -> None:
        """No sum follows."""
        self._aside.close()

    def describe(self) -> str | None:
        """A line for the screen about what is compressed; None where the job asks for nothing."""
        if self._lossy is None:
            return None
        ranks = self._groups[self._axis].size()
        if self._routes is not None:
            inside = self._lossy.options.inside_nodes
            return f"{self._lossy.name} between {f'{ranks} ranks' if inside else f'{len(self._routes.nodes)} nodes'}"
        if ranks == 1:
            return f"{self._lossy.name} has no effect: there is only one data-parallel rank"
        return (
            f"{self._lossy.name} has no effect: all {ranks} data-parallel ranks are on one node; "
            "inside_nodes = true compresses there, too"
        )


class _CompressedSum(WholeSum):
    """Within the node, then compressed between nodes, then back to the node."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        sums: GradientReducer,
        routes: Routes,
        leader: int,
        compressor: Compressor | None,
    ) -> None:
        super().__init__(group)
        self._sums, self._routes, self._leader, self._compressor = sums, routes, leader, compressor

    def all_reduce(self, gradients: Tensor) -> Finish:
        if self._sums.starts_whole:
            return super().all_reduce(gradients)
        return self._sums.run(partial(self._all_reduce, gradients, self._sums.scale))

    def reduce_scatter(self, output: Tensor, gradients: Tensor) -> Finish:
        if self._sums.starts_whole:
            return super().reduce_scatter(output, gradients)
        return self._sums.run(partial(self._reduce_scatter, output, gradients, self._sums.scale))

    def _all_reduce(self, gradients: Tensor, scale: float) -> None:
        self._sum_inside(gradients)
        if self._compressor is not None:
            self._compressor.all_reduce(gradients, scale)
        self._share_inside(gradients)

    def _reduce_scatter(self, output: Tensor, gradients: Tensor, scale: float) -> None:
        mine = gradients.view(self._group.size(), -1)[self._group.rank()]
        if self._routes.in_order:
            self._sum_inside(gradients)
            of_node = gradients.view(len(self._routes.nodes), -1)[self._routes.node]
            if self._compressor is not None:
                self._compressor.reduce_scatter(of_node, gradients, scale)
            self._share_inside(of_node)
        else:
            self._all_reduce(gradients, scale)
        if mine.data_ptr() != output.data_ptr():
            output.copy_(mine)

    def _sum_inside(self, gradients: Tensor) -> None:
        if self._routes.inside is not None:
            dist.all_reduce(gradients, group=self._routes.inside)

    def _share_inside(self, gradients: Tensor) -> None:
        if self._routes.inside is not None:
            dist.broadcast(gradients, self._leader, group=self._routes.inside)


class _Aside:
    """Runs jobs one after the other in the order they come in, beside backward, so that the collectives of one stay together.

    Those of CPU tensors hold the thread that calls them, so it is one of its own; on an accelerator they hold the stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._stream = SideStream(device)
        if not is_accelerator(device):  # OpenMP would give the thread all cores
            self._threads = ThreadPoolExecutor(1, "gradients", torch.set_num_threads, (torch.get_num_threads(),))

    def run(self, job: Finish) -> Finish:
        if self._threads is not None:
            return self._threads.submit(_without_graph, job).result
        with self._stream.entered():
            _without_graph(job)
        return self._stream.done().before_computing

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(
                wait=False, cancel_futures=True
            )  # after a failure, one may wait for a rank that is gone


def _without_graph(job: Finish) -> None:
    with torch.no_grad():
        job()


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()
