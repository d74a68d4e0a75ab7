"""The operations of a group that reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
)
from torch.distributed.distributed_c10d import Work

from hpctrain.base.torch_private import sparse_nbytes
from hpctrain.mpi.collectives import sparse
from hpctrain.mpi.collectives.arithmetic import Reduction
from hpctrain.mpi.collectives.protocol import Collectives
from hpctrain.mpi.process_group.base import GroupBase, apart
from hpctrain.mpi.process_group.checks import check_list, check_root, check_size, outputs_of, views_of
from hpctrain.mpi.transfer.buffers import plain, plain_like


class Reductions(GroupBase):
    """All-reduce, reduce and reduce-scatter."""

    def allreduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions | None = None) -> Work:  # type: ignore[override]
        opts = opts or AllreduceOptions()
        if tensors[0].layout != torch.strided:
            return self._sparse_all_reduce(tensors, opts)
        views = outputs_of(tensors)
        reduce = self._reduction(opts.reduceOp, views)

        def run(collectives: Collectives) -> None:
            for view in views:
                buffer = plain(view)
                collectives.all_reduce(buffer, reduce)
                if buffer is not view:
                    view.copy_(buffer)

        return self._submit("all_reduce", run, list(tensors), views, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: AllreduceCoalescedOptions | None = None) -> Work:
        return self.allreduce(tensors, opts or AllreduceCoalescedOptions())

    def _sparse_all_reduce(self, tensors: Sequence[Tensor], opts: AllreduceOptions) -> Work:
        views = views_of(tensors)
        for view in views:
            sparse.check(view, opts.reduceOp)

        def run(collectives: Collectives) -> None:
            for view in views:
                collectives.sparse_all_reduce(view, opts.reduceOp)

        nbytes = sum(sparse_nbytes(view) for view in views)
        return self._submit(
            "sparse_all_reduce", run, list(tensors), views, opts, nbytes=nbytes, agreed=0, meet_first=True
        )

    def reduce(self, tensors: Sequence[Tensor], opts: ReduceOptions) -> Work:  # type: ignore[override]
        root = check_root(opts.rootRank, self._size)
        views = outputs_of(tensors) if self._rank == root else views_of(tensors)
        reduce = self._reduction(opts.reduceOp, views)

        def run(collectives: Collectives) -> None:
            for view in views:
                buffer = plain(view)
                collectives.reduce(buffer, reduce, root)
                if buffer is not view and collectives.rank == root:
                    view.copy_(buffer)

        return self._submit("reduce", run, list(tensors), views, opts, meet_first=True)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: ReduceScatterOptions | None = None) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: ReduceScatterOptions | None = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        targets, inputs = outputs_of(outputs), views_of(tensors)
        reduce = self._reduction(opts.reduceOp, inputs)
        for target, source in zip(targets, inputs, strict=True):
            check_size("input", source, "the output", target, self._size)

        def run(collectives: Collectives) -> None:
            for target, source in zip(targets, inputs, strict=True):
                buffer = plain_like(target)
                collectives.reduce_scatter_single(buffer, plain(source), reduce)
                if buffer is not target:
                    target.copy_(buffer)

        return self._submit("reduce_scatter_tensor", run, list(outputs), inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def reduce_scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ReduceScatterOptions | None = None
    ) -> Work:
        opts = opts or ReduceScatterOptions()
        targets = outputs_of(outputs)
        reduce = self._reduction(opts.reduceOp, targets)
        lists = [views_of(tensors) for tensors in inputs]
        for target, sources in zip(targets, lists, strict=True):
            check_list("inputs", sources, target, self._size)

        def run(collectives: Collectives) -> None:
            for target, sources in zip(targets, lists, strict=True):
                buffer = plain_like(target)
                parts = [apart(plain(source), buffer) for source in sources]
                collectives.reduce_scatter(buffer, parts, reduce)
                if buffer is not target:
                    target.copy_(buffer)

        sources = [source for tensors in lists for source in tensors]
        return self._submit("reduce_scatter", run, list(outputs), sources, opts, meet_first=True)

    def _reduction(self, op: ReduceOp | ReduceOp.RedOpType, tensors: Sequence[Tensor]) -> Reduction:
        return Reduction.of(op, tensors[0].dtype, self._size)
