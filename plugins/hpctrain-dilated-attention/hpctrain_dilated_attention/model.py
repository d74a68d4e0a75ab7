"""The models `longnet` and `longnet-encoder`."""

from __future__ import annotations

from math import sqrt
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812  (the field's name for it)
from pydantic import model_validator
from torch import Tensor, nn

from hpctrain.api import (
    Batch,
    DistributedAttentionModel,
    Field,
    MetaModel,
    ModelSpec,
    Options,
    PaddedModel,
    PipelineModel,
    Plan,
    Problem,
    TensorParallelModel,
    TokenModel,
    UsageError,
    fill_normal,
    hookimpl,
)
from hpctrain_dilated_attention.attention import DilatedAttention
from hpctrain_dilated_attention.network import Attention, Block, Network
from hpctrain_dilated_attention.pattern import Pattern

_STD = 0.02
_IGNORED = -100
"""The label of a position that has no loss, as in torch's cross_entropy."""
_JUDGED = 16
"""Labels by which an encoder's data are judged, at least."""


class LongNetOptions(Options):
    hidden_size: int = Field(default=768, ge=2, description="width of the residual stream")
    layers: int = Field(default=12, ge=1, le=1000, description="transformer blocks")
    attention_heads: int = Field(
        default=12, ge=1, description="heads per block; hidden_size is a multiple of twice as many"
    )
    vocab_size: int = Field(default=256, ge=1, description="number of token ids")
    max_seq_length: int = Field(default=32768, ge=1, description="longest sequence, in tokens")
    segment_lengths: list[int] = Field(
        default=[2048, 4096, 8192, 16384, 32768], min_length=1, description="tokens of a segment, for each group"
    )
    dilation_rates: list[int] = Field(
        default=[1, 2, 4, 6, 12], description="a group selects each token of this multiple; one rate is 1"
    )
    sparsity_ratio: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the distances between blocks of a segment that are left out; 0: none",
    )
    block_size: int = Field(
        default=64, ge=1, description="selected tokens of a block; sparsity_ratio leaves blocks out"
    )
    rotary_base: float = Field(default=10000.0, gt=1, description="base of the angles that tell positions")
    tie_embeddings: bool = Field(default=False, description="the head shares the matrix of the token embedding")

    @model_validator(mode="after")
    def _fits(self) -> LongNetOptions:
        if self.hidden_size % (2 * self.attention_heads):
            raise ValueError(
                f"expected a hidden_size that is a multiple of 2 x attention_heads = {2 * self.attention_heads}, found "
                f"{self.hidden_size}"
            )
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise ValueError(
                f"expected as many dilation_rates as segment_lengths, found {len(self.dilation_rates)} and "
                f"{len(self.segment_lengths)}"
            )
        if min(*self.segment_lengths, *self.dilation_rates) < 1:
            raise ValueError("expected segment_lengths and dilation_rates of at least 1")
        if 1 not in self.dilation_rates:
            raise ValueError(
                f"expected a rate of 1 among dilation_rates, found {self.dilation_rates}: without it a token sees nothing in some "
                "heads, not even itself"
            )
        return self


class LongNet(MetaModel, TokenModel, TensorParallelModel, DistributedAttentionModel, PipelineModel):
    """A transformer whose attention grows with the length of a sequence, not with its square."""

    Options = LongNetOptions
    options: LongNetOptions
    causal: ClassVar[bool]

    @property
    def pattern(self) -> Pattern:
        """The tokens that see each other."""
        size = self.options
        block = size.block_size if size.sparsity_ratio else None
        return Pattern(tuple(size.segment_lengths), tuple(size.dilation_rates), self.causal, block, size.sparsity_ratio)

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
        if not (plan.compiles and plan.activation_checkpointing.is_compiled):
            return []
        why = (
            "dilated attention is not compiled, and this activation checkpointing needs each block in one piece; use "
            '[activation_checkpointing] mode = "full"'
        )
        return [Problem(why, "compile.enabled")]

    def tensor_plan(self) -> dict[str, str]:
        return {
            "token_embedding": "rowwise",
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
        size, dilated = self.options, DilatedAttention(self.pattern)
        blocks = [
            Block(size.hidden_size, Attention(size.hidden_size, size.attention_heads, size.rotary_base, dilated))
            for _ in range(size.layers)
        ]
        return Network(size.vocab_size, size.hidden_size, blocks, size.tie_embeddings)

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

    def sequence_dims(self) -> dict[str, int]:
        return {"input_ids": 1, "labels": 1}

    def attentions(self, module: nn.Module) -> list[nn.Module]:
        return [inner for inner in module.modules() if isinstance(inner, Attention)]

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        return [block for block in module.modules() if isinstance(block, Block)]

    def ends(self, module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        before, after = (module.token_embedding,), (module.norm, module.head)
        return [m for m in before if isinstance(m, nn.Module)], [m for m in after if isinstance(m, nn.Module)]

    def embed(self, module: nn.Module, batch: Batch) -> Tensor:
        assert isinstance(module, Network)
        return module.token_embedding(batch["input_ids"])  # type: ignore[no-any-return]

    def head(self, module: nn.Module, hidden: Tensor) -> Any:
        assert isinstance(module, Network)
        return module.head(module.norm(hidden))

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        return module(batch["input_ids"])

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != _IGNORED).sum())

    def loss(self, outputs: Any, batch: Batch) -> Tensor:
        # at least float32: a sum over thousands of tokens does not fit 16 bits
        logits = outputs if outputs.dtype == torch.float64 else outputs.float()
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=_IGNORED, reduction="sum")

    def flops(self, batch: Batch) -> int:
        """6 per matrix parameter and token, 12 x head_size per layer and pair of a query and a key
        (Chowdhery et al., "PaLM", 2022, appendix B; causal masking not discounted)."""
        size, (rows, seq) = self.options, batch["input_ids"].shape
        matrices = 12 * size.layers * size.hidden_size**2 + size.hidden_size * size.vocab_size
        pairs = self.pattern.pairs(seq, size.attention_heads)
        head_size = size.hidden_size // size.attention_heads
        return int(6 * matrices * rows * seq + 12 * size.layers * head_size * rows * pairs)


class CausalLongNet(LongNet, PaddedModel):
    """A decoder: each token sees earlier ones, and predicts the next."""

    name = "longnet"
    causal = True

    def padding(self) -> dict[str, float]:
        return {"input_ids": 0, "labels": _IGNORED}  # attention is causal: no token sees the padding


class LongNetEncoder(LongNet):
    """An encoder: tokens see earlier and later ones. The data set says which tokens are predicted, such as masked ones."""

    name = "longnet-encoder"
    causal = False

    def count(self, batch: Batch) -> int:
        ids, labels = batch["input_ids"], batch["labels"]
        told = labels[:, :-1] != _IGNORED
        many = int(told.sum()) >= max(
            _JUDGED, told.numel() / 2
        )  # of hidden tokens, a few may be equal to the next ones
        if many and torch.equal(labels[:, :-1][told], ids[:, 1:][told]):
            raise UsageError(
                '[model] name = "longnet-encoder": the labels are the next tokens, which each token sees; expected a data set that '
                'hides the tokens that are predicted, such as masked ones, or name = "longnet"'
            )
        return super().count(batch)


@hookimpl
def hpctrain_model() -> list[type[ModelSpec]]:
    return [CausalLongNet, LongNetEncoder]
