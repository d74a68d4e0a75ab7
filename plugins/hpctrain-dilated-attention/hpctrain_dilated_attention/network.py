"""A transformer with dilated attention. Shapes: `(batch, seq)` ids, `(batch, seq, hidden)` activations.

Positions are rotations of queries and keys (Su et al., "RoFormer", 2021): no table of a million rows, and a rank knows its
tokens' by its place.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from torch import Tensor, nn

from hpctrain.api import Piece, uncompiled
from hpctrain_dilated_attention.attention import DilatedAttention


class Attention(nn.Module):
    """Multi-head self-attention over the tokens that a pattern lets see each other."""

    def __init__(self, hidden_size: int, heads: int, rotary_base: float, dilated: DilatedAttention) -> None:
        super().__init__()
        self.head_size, self.rotary_base, self.dilated = hidden_size // heads, rotary_base, dilated
        # separate, not fused: a tensor-parallel plan can cut each by columns
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def distribute(self, group: dist.ProcessGroup) -> None:
        """Attend over the ranks of `group`, which have the parts of each sequence in order."""
        self.dilated.group = group

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, hidden) -> the same."""
        query, key, value = (self._heads(linear(x)) for linear in (self.query, self.key, self.value))
        rank = 0 if self.dilated.group is None else self.dilated.group.rank()
        cosine, sine = rotations(query, rank * query.shape[2], self.rotary_base)
        query, key = (rotated(one, cosine, sine) for one in (query, key))
        attended = self.attend(query, key, value)
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    @uncompiled  # it communicates, and lengths differ
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """All (batch, heads, seq, head_size)."""
        # the heads that tensor parallelism has left to this rank: the rows of the query's matrix tell
        first_head = Piece.of("weight", self.query.weight).offsets[0] // self.head_size
        return self.dilated.attend(query, key, value, first_head)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) -> (batch, heads, seq, head_size)"""
        rows, seq, _ = x.shape
        return x.view(rows, seq, -1, self.head_size).transpose(1, 2)


def rotations(x: Tensor, first: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of angles that grow with the position, `(seq, head_size / 2)`, for the tokens of x from `first` on.

    x: (batch, heads, seq, head_size)
    """
    half = x.shape[-1] // 2
    wide = torch.promote_types(x.dtype, torch.float32)
    positions = torch.arange(first, first + x.shape[2], device=x.device, dtype=torch.float64)
    speeds = base ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = positions[:, None] * speeds  # float64: a float32 of a million leaves an angle four digits
    return angles.cos().to(wide), angles.sin().to(wide)


def rotated(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of numbers of x, (batch, heads, seq, head_size)."""
    one, other = x.to(cosine.dtype).chunk(2, dim=-1)
    return torch.cat([one * cosine - other * sine, one * sine + other * cosine], dim=-1).to(x.dtype)


class MLP(nn.Module):
    """Two linear layers around a GELU, four times as wide inside."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, 4 * hidden_size)
        self.down = nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, hidden) -> the same."""
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and MLP, each behind a norm, each added to the residual stream."""

    def __init__(self, hidden_size: int, attention: Attention) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = attention
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp = MLP(hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, seq, hidden) -> the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Network(nn.Module):
    """A token embedding, blocks, a final norm and a head."""

    def __init__(self, vocab_size: int, hidden_size: int, blocks: list[Block], tie_embeddings: bool) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        if tie_embeddings:
            self.head.weight = self.token_embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """-> logits (batch, seq, vocab)"""
        x = self.token_embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
