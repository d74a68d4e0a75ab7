"""Ulysses: between two all-to-alls, each rank has all tokens of some heads and runs ordinary attention on them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.api import Documents, UsageError, causal_attention
from hpctrain.toolkit.attention import narrowed, shared


def ulysses_attention(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents | None = None, *, group: dist.ProcessGroup
) -> Tensor:
    """Causal attention over the full sequence. The tensors hold this rank's tokens, (batch, heads, seq, head_size).

    documents: the sequences that lie one behind the other in the full row.
    """
    size, heads = group.size(), query.shape[1]
    if heads % size:
        raise UsageError(
            f'[parallelism.context] "ulysses": {size} ranks do not divide {heads} attention heads; take "ring"'
        )
    if key.shape[1] % size:
        key, value = shared(key, heads), shared(value, heads)
    query, key, value = (_exchange(t, 1, 2, group) for t in narrowed(query, key, value))
    key, value = shared(key, query.shape[1]), shared(value, query.shape[1])
    return _exchange(causal_attention(query, key, value, documents), 2, 1, group)


def _exchange(tensor: Tensor, cut: int, join: int, group: dist.ProcessGroup) -> Tensor:
    return _Exchange.apply(tensor, cut, join, group)  # type: ignore[no-untyped-call, no-any-return]


class _Exchange(torch.autograd.Function):
    """Cut dim `cut` over the ranks and join dim `join`, for tensors (batch, heads, seq, head_size)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cut: int, join: int, group: dist.ProcessGroup) -> Tensor:
        ctx.cut, ctx.join, ctx.group = cut, join, group
        parts = torch.stack(tensor.chunk(group.size(), dim=cut))  # (ranks, ...)
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), dim=join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.join, ctx.cut, ctx.group), None, None, None
