"""torch's fused attention operators, which return the log-sum-exp of each row; the public function returns the output alone.

Shapes: query, output `(batch, heads, queries, head_size)`, key and value `(batch, heads, keys, head_size)`, rows (the
log-sum-exp) `(batch, heads, queries)` in float32 or wider.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import pad, scaled_dot_product_attention

from hpctrain.base.devices import has_cuda_operators, is_accelerator
from hpctrain.base.torch_private import uncompiled

_ON_CPU = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_ALIGNMENT = 32  # CUDA's memory-efficient kernels take rows of a multiple of this length


class AttentionKernel(ABC):
    """Attention of some queries on some keys, as a part of attention on more keys."""

    @abstractmethod
    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """softmax(query key^T / sqrt(head_size)) value, and its rows."""

    @abstractmethod
    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rows: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The contribution of these keys to the gradients of query, key and value.

        output, rows: over all keys, not only these (Dao et al., "FlashAttention", 2022, algorithm 4).
        """


class Documents:
    """The samples of a packed row: documents that lie one behind the other."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """lengths: tokens of each, padding at its end included."""
        self.lengths = list(lengths)

    @property
    def spans(self) -> list[slice]:
        """The place of each in the row."""
        return [slice(end - length, end) for length, end in zip(self.lengths, accumulate(self.lengths), strict=True)]

    @uncompiled  # rows differ in lengths, for which nothing is to be compiled anew
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention, `(batch, heads, tokens, head_size)`, of each document to itself alone."""
        parts = zip(*(one.split(self.lengths, dim=2) for one in (query, key, value)), strict=True)
        return torch.cat([scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts], dim=2)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, documents: Documents | None = None) -> Tensor:
    """Causal attention, `(batch, heads, tokens, head_size)`; of each document to itself alone, where a row has several."""
    if documents is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True)
    return documents.attend(query, key, value)


def fused_attention(query: Tensor, key: Tensor, value: Tensor) -> AttentionKernel | None:
    """The operator that torch's own attention would take, causal or not; None where it would take several."""
    if not is_accelerator(query.device):
        return _CPUFlash() if query.dtype in _ON_CPU else None
    if not has_cuda_operators(query.device):
        return None  # the others' are not known to return rows of this meaning
    choice = SDPBackend(torch._fused_sdp_choice(query, key, value, None, 0.0, True))
    kernel = _KERNELS.get(choice)
    return None if kernel is None else kernel()


class _CPUFlash(AttentionKernel):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        output, rows = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
        return output, rows

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rows: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, output, rows, 0.0, causal
        )
        return of_query, of_key, of_value


class _Flash(AttentionKernel):
    """Takes heads whose size is a multiple of 8; the public function fills others up with zeros, too."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        size = query.shape[-1]
        wide = [_filled(one) for one in (query, key, value)]
        output, rows, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*wide, 0.0, causal, scale=size**-0.5)
        return output[..., :size], rows

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rows: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        size = query.shape[-1]
        wide = [_filled(one) for one in (gradient, query, key, value, output)]
        seed = _seed(query, (2,), torch.uint64) if torch.version.hip is None else _seed(query)
        made = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *wide, rows, None, None, query.shape[2], key.shape[2], 0.0, causal, seed, _seed(query), scale=size**-0.5
        )
        of_query, of_key, of_value = (one[..., :size] for one in made)
        return of_query, of_key, of_value


class _Efficient(AttentionKernel):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        output, rows, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, 0.0, causal
        )
        return output, rows[..., : query.shape[2]]

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rows: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if torch.version.hip is None:  # AMD's have as many as there are queries
            rows = pad(rows, (0, -rows.shape[-1] % _ALIGNMENT), value=float("inf"))
        of_query, of_key, of_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, None, output, rows, _seed(query), _seed(query), 0.0,
            [True, True, True, False], causal,
        )  # fmt: skip
        return of_query, of_key, of_value


class _CuDNN(AttentionKernel):
    has_unit_dim = False
    """Whether this version's rows have a dim of one element more, which backward wants back."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        output, rows, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, causal, False
        )
        type(self).has_unit_dim = rows.dim() > query.dim() - 1
        return output, rows.view(query.shape[:-1])

    def backward(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, rows: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_query, of_key, of_value = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            gradient, query, key, value, output, rows.unsqueeze(-1) if self.has_unit_dim else rows, _seed(query),
            _seed(query), None, None, None, query.shape[2], key.shape[2], 0.0, causal,
        )  # fmt: skip
        return of_query, of_key, of_value


_KERNELS: dict[SDPBackend, Callable[[], AttentionKernel]] = {
    SDPBackend.FLASH_ATTENTION: _Flash,
    SDPBackend.EFFICIENT_ATTENTION: _Efficient,
    SDPBackend.CUDNN_ATTENTION: _CuDNN,
}


def _filled(tensor: Tensor) -> Tensor:
    lacking = -tensor.shape[-1] % 8
    return pad(tensor, (0, lacking)) if lacking else tensor


def _seed(like: Tensor, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.int64) -> Tensor:
    """The random state that a backward asks for and, without dropout, does not read."""
    return torch.zeros(shape, dtype=dtype, device=like.device)
