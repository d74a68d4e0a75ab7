"""The kernels of ring attention: in parts, as ranks compute it, against torch's attention at once in float64."""

from __future__ import annotations

import pytest
import torch
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


def compare(made: list[torch.Tensor], expected: list[torch.Tensor], bound: float) -> None:
    for name, mine, theirs in zip("oqkv", made, expected, strict=True):
        apart = ((mine - theirs).abs().max() / theirs.abs().max()).item()
        assert apart < bound, name
