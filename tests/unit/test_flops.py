"""Floating-point operations of operators that torch does not count."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hpctrain.base.flops import CountedFlops

TOKENS, BATCH = 5, 3
CASES: dict[str, Callable[[], nn.LSTM]] = {
    "two layers": lambda: nn.LSTM(7, 4, num_layers=2),
    "both directions": lambda: nn.LSTM(7, 4, num_layers=2, bidirectional=True, batch_first=True),
    "without bias": lambda: nn.LSTM(7, 4, bias=False),
}


def steps(layer: nn.LSTM) -> None:
    rows = (BATCH, TOKENS) if layer.batch_first else (TOKENS, BATCH)
    hidden, cell = torch.zeros(2, (1 + layer.bidirectional) * layer.num_layers, BATCH, 4, requires_grad=True)
    layer(torch.ones(*rows, 7, requires_grad=True), (hidden, cell))[0].sum().backward()


@pytest.mark.parametrize("case", CASES)
def test_a_recurrent_kernel_counts_as_its_products(case: str) -> None:
    """torch's own counter sees them where the layer runs without the kernel."""
    with torch.backends.mkldnn.flags(enabled=False), FlopCounterMode(display=False) as single:
        steps(CASES[case]())
    with CountedFlops(lambda: True) as counted:
        steps(CASES[case]())
    assert counted.total == single.get_total_flops() > 0


def test_kernels_of_gpus_count_all_their_layers() -> None:
    """On shapes only, as no GPU is needed for them."""
    gates, sizes = 4 * 6, ((24, 7), (24, 6), (24,), (24,), (24, 6), (24, 6), (24,), (24,))
    weights: list[Tensor] = [torch.empty(size, device="meta") for size in sizes]
    state = torch.empty(2, BATCH, 6, device="meta")
    tokens = torch.empty(TOKENS, BATCH, 7, device="meta")
    with CountedFlops(lambda: True) as counted:
        torch.ops.aten._cudnn_rnn(tokens, weights, 4, None, state, state, 2, 6, 0, 2, False, 0.0, True, False, [], None)
    assert counted.total == 2 * TOKENS * BATCH * gates * (7 + 3 * 6)
