"""Ring attention: keys and values travel around the ranks, and each rank attends to those it currently has.

Causal attention would leave the ranks with the first tokens idle. So the sequence is cut into 2n chunks, and rank r holds
chunks r and 2n - 1 - r: every rank then has the same work with every other rank's keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.api import AttentionKernel, Documents, uncompiled
from hpctrain.toolkit.attention import kernel_of, merge, narrowed, shared


def positions(seq: int, size: int, rank: int) -> Tensor:
    """The tokens of a sequence of length `seq` on `rank`. `seq` must be a multiple of 2 x size."""
    chunks = torch.arange(seq).chunk(2 * size)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])


@uncompiled  # it communicates
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents | None = None, *, group: dist.ProcessGroup
) -> Tensor:
    """Causal attention over the full sequence. The tensors hold this rank's tokens, (batch, heads, seq, head_size).

    documents: this rank's part of each of several sequences, which lie one behind the other.
    """
    query, key, value = narrowed(query, key, value)
    apply: Callable[..., Tensor] = _Ring.apply
    # chosen while gradients are on: not every kernel has a backward for every size
    kernel = kernel_of(query, *(shared(one, query.shape[1]) for one in (key, value)))
    spans = (documents or Documents([query.shape[2]])).spans
    return apply(query, key, value, group, kernel, spans)


class _Pass:
    """Sends a tensor to the next rank and receives one from the previous rank."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        ahead, behind = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
        self._arriving = torch.empty_like(tensor)
        self._works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, tensor, ahead, group), dist.P2POp(dist.irecv, self._arriving, behind, group)]
        )

    def wait(self) -> Tensor:
        """The received tensor."""
        for work in self._works:
            work.wait()
        return self._arriving


def _visible(
    rank: int, owner: int, query: Tensor, both: Tensor, span: slice
) -> tuple[Tensor, Tensor, slice, slice, bool]:
    """The parts of `query` and of `both` (keys and values of `owner`) that meet, their slices, and whether causally.

    span: the tokens of a sequence on each rank.
    """
    middle = (span.start + span.stop) // 2
    queries = keys = span
    if owner < rank:  # its first chunk is before both of mine, its second after both
        keys = slice(span.start, middle)
    elif owner > rank:  # both of its chunks lie between mine
        queries = slice(middle, span.stop)
    theirs = shared(both[:, :, :, keys], query.shape[1]).contiguous()  # those that travel are as few as the model has
    return query[:, :, queries].contiguous(), theirs, queries, keys, owner == rank


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: dist.ProcessGroup,
        kernel: AttentionKernel,
        spans: list[slice],
    ) -> Tensor:
        rank, size = group.rank(), group.size()
        both = torch.stack([key, value])
        home = both
        wide = torch.promote_types(query.dtype, torch.float32)
        # what is changed below is no output of an operator, which selective checkpointing may keep
        output = torch.empty_like(query, dtype=wide)
        rows = torch.empty(query.shape[:3], dtype=wide, device=query.device)
        for step in range(size):
            passing = _Pass(both, group) if step + 1 < size else None
            for span in spans:
                mine, theirs, queries, _, causal = _visible(rank, (rank - step) % size, query, both, span)
                part = kernel.forward(mine, theirs[0], theirs[1], causal)
                if step > 0:
                    part = merge((output[:, :, queries], rows[:, :, queries]), (part[0].to(wide), part[1]))
                output[:, :, queries], rows[:, :, queries] = part
            if passing is not None:
                both = passing.wait()
        output = output.to(query.dtype)
        ctx.group, ctx.kernel, ctx.spans = group, kernel, spans
        ctx.save_for_backward(query, home, output, rows)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        query, both, output, rows = ctx.saved_tensors
        group: dist.ProcessGroup = ctx.group
        rank, size = group.rank(), group.size()
        # sums over ranks in 16 bits would lose more with each rank
        wide = torch.promote_types(query.dtype, torch.float32)
        of_query = torch.zeros_like(query, dtype=wide)
        of_both = torch.zeros_like(both, dtype=wide)  # the gradient of `both`, which travels with it
        arriving: _Pass | None = None
        for step in range(size):
            passing = _Pass(both, group) if step + 1 < size else None
            of_keys = []
            for span in ctx.spans:
                mine, theirs, queries, keys, causal = _visible(rank, (rank - step) % size, query, both, span)
                out, *others = (one[:, :, queries].contiguous() for one in (gradient, output, rows))
                made = ctx.kernel.backward(out, mine, theirs[0], theirs[1], *others, causal)
                of_query[:, :, queries] += made[0]
                of_keys.append((keys, torch.stack(made[1:])))
            if arriving is not None:
                of_both = arriving.wait()
            for keys, found in of_keys:
                of_both[:, :, :, keys] += found.to(wide).unflatten(2, (both.shape[2], -1)).sum(3)
            arriving = _Pass(of_both, group)  # the last pass returns it to its owner
            if passing is not None:
                both = passing.wait()
        assert arriving is not None
        of_key, of_value = arriving.wait().to(query.dtype)
        return of_query.to(query.dtype), of_key, of_value, None, None, None
