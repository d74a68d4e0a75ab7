"""A decoder-only transformer (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

Shapes: `(batch, seq)` ids, `(batch, seq, hidden)` activations, `(batch, heads, seq, head_size)` in attention.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from pydantic import model_validator
from torch import Tensor, nn

from hpctrain.api import (
    Batch,
    ContextParallelModel,
    Documents,
    ExportableModel,
    Field,
    MetaModel,
    ModelSpec,
    Options,
    PackedModel,
    PipelineModel,
    Plan,
    Problem,
    TensorParallelModel,
    TokenModel,
    UsageError,
    causal_attention,
    fill_normal,
    hookimpl,
)
from hpctrain.toolkit.losses import IGNORED, NOT_CHUNKED, can_chunk, chunked_cross_entropy, summed_cross_entropy

_STD = 0.02


class GPTOptions(Options):
    hidden_size: int = Field(default=128, ge=1, description="width of the residual stream")
    layers: int = Field(default=4, ge=1, le=1000, description="transformer blocks")
    attention_heads: int = Field(default=4, ge=1, description="heads per block; must divide hidden_size")
    vocab_size: int = Field(default=256, ge=1, description="number of token ids")
    max_seq_length: int = Field(default=128, ge=1, description="longest sequence, in tokens")
    tie_embeddings: bool = Field(default=False, description="the head shares the matrix of the token embedding")
    loss_chunk: int = Field(
        default=0, ge=0, description="tokens whose logits exist at a time in training, for a large vocabulary; 0: all"
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> GPTOptions:
        if self.hidden_size % self.attention_heads:
            raise ValueError(f"expected attention_heads that divide hidden_size {self.hidden_size}")
        return self


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden_size // heads
        # separate, not fused: a tensor-parallel plan can cut each by columns
        self.query = nn.Linear(hidden_size, hidden_size)
        self.key = nn.Linear(hidden_size, hidden_size)
        self.value = nn.Linear(hidden_size, hidden_size)
        self.output = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """x: (batch, seq, hidden) -> the same."""
        query, key, value = (self._heads(linear(x)) for linear in (self.query, self.key, self.value))
        attended = self.attend(query, key, value, documents)
        return self.output(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, documents: Documents | None) -> Tensor:
        """All (batch, heads, seq, head_size)."""
        return causal_attention(query, key, value, documents)

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, seq, hidden) -> (batch, heads, seq, head_size)"""
        rows, seq, _ = x.shape
        return x.view(rows, seq, x.shape[-1] // self.head_size, self.head_size).transpose(1, 2)


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

    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden_size)
        self.attention = Attention(hidden_size, heads)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.mlp = MLP(hidden_size)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """x: (batch, seq, hidden) -> the same."""
        x = x + self.attention(self.attention_norm(x), documents=documents)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class GPTModule(nn.Module):
    """Token and position embeddings, blocks, a final norm and a head."""

    def __init__(self, options: GPTOptions) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(options.vocab_size, options.hidden_size)
        self.position_embedding = nn.Embedding(options.max_seq_length, options.hidden_size)
        self.layers = nn.ModuleList(Block(options.hidden_size, options.attention_heads) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.hidden_size)
        self.head = nn.Linear(options.hidden_size, options.vocab_size, bias=False)
        self.loss_chunk = options.loss_chunk
        if options.tie_embeddings:
            self.head.weight = self.token_embedding.weight

    def embed(self, input_ids: Tensor, positions: Tensor | None) -> Tensor:
        """input_ids: (batch, seq), positions: (seq,), from 0 by default -> (batch, seq, hidden)"""
        if positions is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return self.token_embedding(input_ids) + self.position_embedding(positions)  # type: ignore[no-any-return]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """-> logits (batch, seq, vocab); with labels the sum of the loss, whose logits exist in chunks"""
        x = self.embed(input_ids, positions)
        for layer in self.layers:
            x = layer(x, documents)
        x = self.norm(x)
        # here, where a strategy has gathered the head's matrix
        return self.head(x) if labels is None else chunked_cross_entropy(self.head, x, labels, self.loss_chunk)


class GPT(
    MetaModel, TokenModel, PackedModel, TensorParallelModel, ContextParallelModel, PipelineModel, ExportableModel
):
    """A decoder-only transformer language model."""

    name = "gpt"
    Options = GPTOptions
    options: GPTOptions

    @property
    def vocab_size(self) -> int:
        return self.options.vocab_size

    @property
    def max_seq_length(self) -> int:
        return self.options.max_seq_length

    @property
    def attention_heads(self) -> int:
        return self.options.attention_heads

    def problems(self, plan: Plan) -> list[Problem]:
        if self.options.loss_chunk and not can_chunk(plan):
            return [Problem(NOT_CHUNKED, "model.loss_chunk")]
        if not (plan.packs and plan.compiles and plan.activation_checkpointing.is_compiled):
            return []
        why = (
            "attention in packed rows is not compiled, and this activation checkpointing needs each block in one piece; "
            'use [activation_checkpointing] mode = "full"'
        )
        return [Problem(why, "compile.enabled")]

    def tensor_plan(self) -> dict[str, str]:
        return {
            "token_embedding": "rowwise",
            "position_embedding": "positions",
            "layers.*.attention_norm": "norm",
            "layers.*.attention": "gather",
            "layers.*.attention.query": "colwise",
            "layers.*.attention.key": "colwise",
            "layers.*.attention.value": "colwise",
            "layers.*.attention.output": "rowwise",
            "layers.*.mlp_norm": "norm",
            "layers.*.mlp": "gather",
            "layers.*.mlp.up": "colwise",
            "layers.*.mlp.down": "rowwise",
            "norm": "norm",
            "head": "vocabulary",
        }

    def build(self) -> nn.Module:
        return GPTModule(self.options)

    def initialize(self, name: str, tensor: Tensor, rows: tuple[int, int], seed: int) -> None:
        """GPT-2's: normal with std 0.02, the two projections into the residual stream scaled by 1/sqrt(2 layers)."""
        if name.endswith("bias"):
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)
        elif name.endswith(("attention.output.weight", "mlp.down.weight")):
            fill_normal(tensor, _STD / sqrt(2 * self.options.layers), seed, name, rows)
        else:
            fill_normal(tensor, _STD, seed, name, rows)

    def padding(self) -> dict[str, float]:
        return {"input_ids": 0, "labels": IGNORED}  # attention is causal: no token sees the padding

    def sequence_dims(self) -> dict[str, int]:
        return {"input_ids": 1, "labels": 1}

    def attentions(self, module: nn.Module) -> list[nn.Module]:
        return [inner for inner in module.modules() if isinstance(inner, Attention)]

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        return [block for block in module.modules() if isinstance(block, Block)]

    def ends(self, module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        before, after = (module.token_embedding, module.position_embedding), (module.norm, module.head)
        return [m for m in before if isinstance(m, nn.Module)], [m for m in after if isinstance(m, nn.Module)]

    def embed(self, module: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(module, GPTModule)
        return module.embed(batch["input_ids"], batch.get("positions"))

    def head(self, module: nn.Module, hidden: Tensor) -> Any:
        assert isinstance(module, GPTModule)
        return module.head(module.norm(hidden))

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        labels = batch["labels"] if self.options.loss_chunk and torch.is_grad_enabled() else None
        return module(batch["input_ids"], batch.get("positions"), batch.get("documents"), labels)

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        return outputs if outputs.dim() == 0 else summed_cross_entropy(outputs, batch["labels"])

    def export(self, values: Callable[[str], Tensor], out: Path, merged: bool) -> str:
        """Write a GPT2LMHeadModel of transformers."""
        if merged:
            raise UsageError("--merged adds an adapter to what it adapts, and gpt has none; leave it out")
        from hpctrain_plugins.model.gpt2_export import export_gpt2  # here: training exports nothing

        return export_gpt2(values, out, **self.options.model_dump(exclude={"loss_chunk"}))

    def flops(self, batch: Batch) -> int:
        """6 per matrix parameter and token, plus attention's 12 x layers x hidden x seq per token
        (Chowdhery et al., "PaLM", 2022, appendix B; causal masking not discounted)."""
        size, (rows, seq) = self.options, batch["input_ids"].shape
        matrices = 12 * size.layers * size.hidden_size**2 + size.hidden_size * size.vocab_size
        documents: Documents | None = batch.get("documents")
        lengths = [seq] * rows if documents is None else documents.lengths
        attended = sum(length**2 for length in lengths)
        return int(6 * matrices * rows * seq + 12 * size.layers * size.hidden_size * attended)


@hookimpl
def hpctrain_model() -> list[type[ModelSpec]]:
    return [GPT]
