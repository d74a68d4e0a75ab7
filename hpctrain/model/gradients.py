"""The sums of gradient buckets that a strategy asks for (contracts/compression.py), compressed as the job says."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.base.devices import is_accelerator
from hpctrain.base.side_stream import SideStream
from hpctrain.base.torch_private import foreach_copy_
from hpctrain.contracts.compression import BucketSum, Compression, Compressor, Finish, GradientBucket, LossyCompression
from hpctrain.contracts.pieces import Piece
from hpctrain.model.mesh import Meshes, group_apart


class GradientReducer:
    """Makes the sums of a job, and keeps what their compression remembers. One per rank."""

    def __init__(self, compression: Compression, meshes: Meshes) -> None:
        axes = meshes.data_axes
        self.group = meshes.group
        self._groups = {axis: meshes.model[axis].get_group() for axis in axes}
        # the outer one: hybrid sharding is for nodes that shard among their own ranks
        self._axis = next((axis for axis in axes if self._groups[axis].size() > 1), axes[-1])
        self._lossy = compression if isinstance(compression, LossyCompression) else None
        self._apart = self._groups[self._axis]
        self._threads: ThreadPoolExecutor | None = None
        device = torch.device(meshes.model.device_type)
        self._stream = SideStream(device)
        if self._lossy is not None and not is_accelerator(device):
            # a group of the thread's own: stage 3's gathers would come in between on some ranks earlier than on others
            self._apart = group_apart(meshes.model, self._axis)
            cores = torch.get_num_threads()  # OpenMP would give the thread all
            self._threads = ThreadPoolExecutor(1, "gradients", torch.set_num_threads, (cores,))
        self._compressors: list[Compressor] = []
        self._kept: list[Tensor] = []
        self.step, self.scale = 0, 1.0

    def bucket(self, content: GradientBucket, axis: str) -> BucketSum:
        """The sum of such a bucket over `axis`; the same buckets in the same order on all its ranks."""
        group = self.group(axis, content.told[0].piece.axes if content.told else ())
        is_compressed = axis == self._axis and group is self._groups[axis] and group.size() > 1
        if self._lossy is None or not is_compressed or content.dtype.is_complex:
            return _Sum(self, group, None)  # complex gradients travel in full: compressors know real numbers
        self._compressors.append(self._lossy.compressor(content, self._apart))
        return _Sum(self, group, self._compressors[-1])

    def begin(self, step: int, scale: float, may_be_left_out: bool) -> None:
        """A step begins, counted from 0; its gradients come multiplied by `scale`."""
        self.step, self.scale = step, scale
        live = self._state()
        if may_be_left_out and live:  # a step that is left out takes its error feedback back
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
        """Run `job` in submission order, overlapping backward, so that the collectives of one stay together; the
        result waits for it.

        Those of CPU tensors hold the thread that calls them, so it is one of its own; on an accelerator they hold the stream.
        """
        if self._threads is not None:
            return self._threads.submit(_without_graph, job).result
        with self._stream.entered():
            _without_graph(job)
        return self._stream.done().before_computing

    def close(self) -> None:
        """No sum follows."""
        if self._threads is not None:  # after a failure, one may wait for a rank that is gone
            self._threads.shutdown(wait=False, cancel_futures=True)

    def describe(self) -> str | None:
        """A line for the screen about what is compressed; None where the job asks for nothing."""
        if self._lossy is None:
            return None
        ranks = self._groups[self._axis].size()
        if ranks == 1:
            return f"{self._lossy.name} has no effect: there is only one data-parallel rank"
        return f"{self._lossy.name} between {ranks} ranks"


class _Sum:
    """Sums a bucket over a group, step after step: from `start_step` on by its compressor, if it has one."""

    def __init__(self, sums: GradientReducer, group: dist.ProcessGroup, compressor: Compressor | None) -> None:
        self._sums, self._group, self._compressor = sums, group, compressor

    def all_reduce(self, gradients: Tensor) -> Finish:
        if self._compressor is None or self._sums.starts_whole:
            return partial(_wait, dist.all_reduce(gradients, group=self._group, async_op=True))
        return self._sums.run(partial(self._compressor.all_reduce, gradients, self._sums.scale))

    def reduce_scatter(self, output: Tensor, gradients: Tensor) -> Finish:
        if self._compressor is None or self._sums.starts_whole:
            work = dist.reduce_scatter_single(output, gradients, group=self._group, async_op=True)
            return partial(_wait, work)
        return self._sums.run(partial(self._compressor.reduce_scatter, output, gradients, self._sums.scale))


def _without_graph(job: Finish) -> None:
    with torch.no_grad():
        job()


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


class Residual:
    """The part of a bucket that this rank has not sent yet, without loss scaling: error feedback adds it to the next sum (Stich et
    al., "Sparsified SGD with Memory", 2018; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019).

    Only the sum over the ranks matters: it is what the parameters still lack. Checkpoints have that sum, so it loads into any
    number of ranks. It is given to one rank, parameter by parameter in turns: to divide it would round, and need a copy.
    """

    def __init__(self, bucket: GradientBucket, group: dist.ProcessGroup) -> None:
        self._bucket, self._group = bucket, group
        self.flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=bucket.device)

    def add_to(self, gradients: Tensor, scale: float) -> None:
        """Add what is left from before to the flat gradients of this step, which are multiplied by `scale`."""
        gradients.add_(self.flat, alpha=scale)

    def unscale(self, scale: float) -> None:
        """`flat` has been filled with what is left now, multiplied by `scale`."""
        if scale != 1.0:
            self.flat.mul_(1.0 / scale)

    def consolidate(self) -> None:
        """Bring the sum over the ranks of each parameter to one of them; collective over the group."""
        dist.all_reduce(self.flat, group=self._group)
        for number, span in enumerate(self._bucket.spans):
            if not self._owns(number):
                span.view(self.flat).zero_()  # the sum over the ranks stays what it was

    def pieces(self) -> list[Piece]:
        """This rank's pieces after `consolidate`, named residual/NAME."""
        return [
            replace(span.piece, name=f"residual/{span.piece.name}", tensor=span.view(self.flat))
            for number, span in enumerate(self._bucket.spans)
            if self._owns(number)
        ]

    def _owns(self, number: int) -> bool:
        return number % self._group.size() == self._group.rank()
