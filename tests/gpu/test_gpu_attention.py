"""The kernels of ring and dilated attention: in parts, as ranks compute it, against attention at once in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dense_attention import dense, times_seen
from hpctrain_dilated_attention.attention import DilatedAttention
from hpctrain_dilated_attention.pattern import Pattern
from on_gpu import DEVICE, needs_gpu
from ring_parts import at_once, drawn, in_parts
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpctrain.toolkit.attention import Arithmetic, kernel_of

pytestmark = [needs_gpu, pytest.mark.timeout(120)]

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""Of the largest element."""
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


@pytest.mark.parametrize("size", [64, 80, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", FUSED, ids=lambda one: one.name)
def test_parts_add_up(backend: SDPBackend, dtype: torch.dtype, size: int) -> None:
    tensors = drawn(3 * 72, 4, size, dtype, str(DEVICE))
    with sdpa_kernel(backend):
        try:
            kernel_of(*tensors[:3])
        except RuntimeError as error:  # as torch's own attention says it
            pytest.skip(f"torch has no such kernel for {dtype} and heads of {size}: {error}")
        made = in_parts(*tensors, parts=3)
    compare(made, at_once(*tensors), BOUNDS[dtype])


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_the_kernel_that_torch_takes(dtype: torch.dtype) -> None:
    """16 bits and float32 never take the arithmetic that keeps whole score matrices."""
    tensors = drawn(4 * 96, 4, 64, dtype, str(DEVICE))
    assert isinstance(kernel_of(*tensors[:3]), Arithmetic) == (dtype == torch.float64)
    compare(in_parts(*tensors, parts=4), at_once(*tensors), BOUNDS[dtype])


@pytest.mark.parametrize("sparse", [{}, {"block": 8, "sparsity_ratio": 0.5}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", FUSED, ids=lambda one: one.name)
def test_dilated_attention(backend: SDPBackend, dtype: torch.dtype, sparse: dict[str, Any]) -> None:
    """Pieces of rows and of segments, where a kernel may go by the pointer alone."""
    pattern = Pattern((32, 96, 200), (1, 2, 3), **sparse)
    query, key, value, gradient = drawn(200, 4, 64, dtype, str(DEVICE))
    inputs = [one.requires_grad_() for one in (query, key, value)]
    with sdpa_kernel(backend):
        try:
            kernel_of(*inputs)
        except RuntimeError as error:
            pytest.skip(f"torch has no such kernel for {dtype}: {error}")
        output = DilatedAttention(pattern).attend(*inputs)
        output.backward(gradient)
    wide = [one.detach().double().cpu().requires_grad_() for one in inputs]
    expected = dense(*wide, times_seen(pattern, 200, 4))
    expected.backward(gradient.double().cpu())
    made = [one.detach().double().cpu() for one in (output, *(one.grad for one in inputs))]
    compare(made, [expected.detach(), *(one.grad for one in wide)], BOUNDS[dtype])


def compare(made: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    for name, mine, theirs in zip("oqkv", made, expected, strict=True):
        apart = ((mine - theirs).abs().max() / theirs.abs().max()).item()
        assert apart < bound, name
