"""The parts of ring attention, in one process; tests/ranks/test_layouts.py has the ring, tests/gpu the kernels of GPUs."""

from __future__ import annotations

import pytest
import torch
from ring_parts import at_once, drawn, in_parts

from hpctrain.toolkit import attention

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Of the largest element."""


@pytest.mark.parametrize("size", [16, 20])
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_parts_add_up(
    fused: bool, dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch, record_property: pytest.RecordProperty
) -> None:
    if not fused:  # what devices without a fused kernel compute
        monkeypatch.setattr(attention, "fused_attention", lambda query, key, value: None)
    tensors = drawn(192, 2, size, dtype, "cpu")
    kernel = attention.kernel_of(*tensors[:3])
    assert isinstance(kernel, attention.Arithmetic) != fused
    for name, mine, expected in zip("oqkv", in_parts(*tensors, parts=3), at_once(*tensors), strict=True):
        apart = ((mine - expected).abs().max() / expected.abs().max()).item()
        record_property(name, apart)
        assert apart < BOUNDS[dtype], name


def test_rows_are_float32_under_autocast() -> None:
    """Backward, where autocast is off, counts on the same sums."""
    query, key, value = (3 * one for one in drawn(64, 2, 16, torch.bfloat16, "cpu")[:3])
    kernel = attention.Arithmetic()
    _, expected = kernel.forward(query.float(), key.float(), value.float(), causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        _, rows = kernel.forward(query, key, value, causal=True)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, expected)
