"""Attention of some queries on some keys, and the merging of such parts. Shapes are those of AttentionKernel.

For attention whose keys come in parts: from other ranks (a ring), or in several patterns (dilated attention).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hpctrain.api import AttentionKernel, fused_attention


def kernel_of(query: Tensor, key: Tensor, value: Tensor) -> AttentionKernel:
    """A kernel for parts of this attention: torch's fused one where it has one."""
    return fused_attention(query, key, value) or Arithmetic()


class Arithmetic(AttentionKernel):
    """Plain operators in float32 or wider, for devices, data types and head sizes without a fused kernel in torch.

    Keeps whole matrices of scores, `(batch, heads, queries, keys)`, during a call.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        # autocast would compute the scores in 16 bits, and only in forward: it is off in backward
        with torch.autocast(query.device.type, enabled=False):
            scores = _scores(query, key, causal)
            rows = torch.logsumexp(scores, -1)  # backward makes the weights again from these: no matrix is kept
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
        # parts are causal only where queries and keys are the same tokens, so the triangle begins at the diagonal
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(later, float("-inf"))
    return scores


def narrowed(*tensors: Tensor) -> list[Tensor]:
    """The tensors in autocast's dtype, as products have them, so that half the bytes travel."""
    device = tensors[0].device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
    return [tensor.to(dtype) if tensor.dtype == torch.float32 else tensor for tensor in tensors]


def shared(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values `(..., fewer, seq, head_size)`, which queries share, repeated for each of their `heads`."""
    groups = heads // tensor.shape[-3]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, -3)  # queries side by side share


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge outputs and log-sum-exps over two sets of keys into those over both (online softmax)."""
    (output, rows), (other, other_rows) = first, second
    merged = torch.logaddexp(rows, other_rows)  # unlike a sum of exponentials, it can't overflow
    output = output * (rows - merged).exp().unsqueeze(-1) + other * (other_rows - merged).exp().unsqueeze(-1)
    return output, merged
