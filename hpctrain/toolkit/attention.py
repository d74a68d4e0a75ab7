"""Attention of some queries on some keys, and the merge of such parts. Shapes are those of AttentionKernel.

For attention whose keys come in parts: from other ranks (a ring), or in several patterns (dilated attention).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.api import AttentionKernel, fused_attention


def kernel_of(query: Tensor, key: Tensor, value: Tensor) -> AttentionKernel:
    """The way to compute parts of this attention."""
    return fused_attention(query, key, value) or Arithmetic()


class Arithmetic(AttentionKernel):
    """Plain operators in float32 or wider, for devices, data types and head sizes that torch has no fused kernel for.

    Keeps whole matrices of scores, `(batch, heads, queries, keys)`, for the time of a call.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        # autocast would compute the scores in 16 bits, and only in forward: it is off in backward
        with torch.autocast(query.device.type, enabled=False):
            scores = _scores(query, key, causal)
            rows = torch.logsumexp(scores, -1)
            weights: Tensor = (scores - rows.unsqueeze(-1)).exp().to(value.dtype)
            return weights @ value, rows

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rows: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = (_scores(query, key, causal) - rows.unsqueeze(-1)).exp()
        wide = gradient.to(weights.dtype)
        of_weights = wide @ value.to(weights.dtype).transpose(-1, -2)
        of_scores = weights * (of_weights - (wide * output.to(weights.dtype)).sum(-1, keepdim=True))
        of_scores *= query.shape[-1] ** -0.5
        return (
            (of_scores @ key.to(weights.dtype)).to(query.dtype),
            (of_scores.transpose(-1, -2) @ query.to(weights.dtype)).to(key.dtype),
            (weights.transpose(-1, -2) @ wide).to(value.dtype),
        )


def _scores(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores: Tensor = query.to(wide) @ key.to(wide).transpose(-1, -2) * query.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def narrowed(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's dtype, as products have them, so that what travels is half as long."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    return [one.to(dtype) if one.dtype == torch.float32 else one for one in tensors]


def shared(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values `(..., fewer, seq, head_size)`, which queries share, repeated for each of their `heads`."""
    groups = heads // tensor.shape[-3]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, -3)


def merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge outputs and log-sum-exps over two sets of keys into those over both (online softmax)."""
    (output, rows), (more, more_rows) = one, other
    both = torch.logaddexp(rows, more_rows)
    output = output * (rows - both).exp().unsqueeze(-1) + more * (more_rows - both).exp().unsqueeze(-1)
    return output, both
