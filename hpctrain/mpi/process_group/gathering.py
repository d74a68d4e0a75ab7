"""The operations of a group that gather and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor
from torch.distributed import GatherOptions, ScatterOptions
from torch.distributed.distributed_c10d import Work

from hpctrain.base.torch_groups import AllgatherOptions
from hpctrain.mpi.collectives.protocol import Collectives
from hpctrain.mpi.process_group.base import GroupBase, apart, into
from hpctrain.mpi.process_group.checks import check_list, check_own_part, check_root, check_size, outputs_of, views_of
from hpctrain.mpi.transfer.buffers import overlap, plain, plain_like, same_memory


class Gathering(GroupBase):
    """All-gather, gather and scatter."""

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: AllgatherOptions | None = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        targets, sources = outputs_of(outputs), views_of(tensors)
        for target, source in zip(targets, sources, strict=True):
            check_size("output", target, "the input", source, self._size)

        def run(collectives: Collectives) -> None:
            for target, source in zip(targets, sources, strict=True):
                buffer = plain_like(target)
                collectives.all_gather_single(buffer, plain(source))
                if buffer is not target:
                    target.copy_(buffer)

        return self._submit("all_gather_into_tensor", run, list(outputs), sources, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def allgather(  # type: ignore[override]
        self, outputs: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], opts: AllgatherOptions | None = None
    ) -> Work:
        opts = opts or AllgatherOptions()
        sources, lists = views_of(tensors), [outputs_of(targets) for targets in outputs]
        for targets, source in zip(lists, sources, strict=True):
            check_list("outputs", targets, source, self._size, any_size=True)
            check_own_part(targets[self._rank], source)
        # Every rank passes all outputs, so all ranks agree on whether the sizes differ.
        even = all(target.nbytes == targets[0].nbytes for targets in lists for target in targets)

        def run(collectives: Collectives) -> None:
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
        targets = outputs_of(outputs[0]) if self._rank == root else []
        if self._rank == root:
            check_list("outputs", targets, source, self._size)

        def run(collectives: Collectives) -> None:
            into(targets, lambda buffers: collectives.gather(buffers, plain(source), root))

        return self._submit("gather", run, [list(o) for o in outputs], [source], opts, meet_first=True)

    def scatter(  # type: ignore[override]
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: ScatterOptions
    ) -> Work:
        root = check_root(opts.rootRank, self._size)
        targets = outputs_of(outputs)
        sources = views_of(inputs[0]) if self._rank == root else []
        if self._rank == root:
            check_list("inputs", sources, targets[0], self._size)

        def run(collectives: Collectives) -> None:
            into(
                targets,
                lambda b: collectives.scatter(b[0], [apart(plain(s), b[0]) for s in sources], root),
            )

        return self._submit("scatter", run, list(outputs), targets, opts, meet_first=True)


def _all_gather(collectives: Collectives, mine: Tensor, even: bool, buffers: Sequence[Tensor]) -> None:
    if not same_memory(mine, buffers[collectives.rank]) and any(overlap(mine, buffer) for buffer in buffers):
        mine = mine.clone()
    collectives.all_gather(buffers, mine, even=even)
