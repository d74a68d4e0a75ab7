"""Computes the share of a GPU's peak that a training uses: its MFU, model FLOP/s utilization.

    MFU = tokens per second x FLOPs per token / peak FLOP/s

FLOPs per token of a transformer's training are 6 for each parameter of its matrices, embeddings left out (2 in forward, 4
in backward), and 12 x layers x hidden x seq for attention's two products with a sequence of seq tokens (Chowdhery et al.,
"PaLM", 2022, appendix B). Masked scores, which are half of them, count in full. Recomputation by activation
checkpointing doesn't count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from hpctrain.base.devices import device_name, mark, seconds_between

PEAKS = {
    "H200 NVL": 835e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H200": 989e12, "H100": 989e12, "A100": 312e12,
}  # fmt: skip
"""bf16 without sparsity, from NVIDIA's data sheets. The first key that is part of the device's name applies."""
_PRODUCTS = 20
"""The number of timed products."""


@dataclass(frozen=True)
class Peak:
    """FLOP/s in bf16, and the source of the number."""

    flops: float
    source: str


def flops_per_token(model: dict[str, Any]) -> int:
    """model: the table [model] of a job with `gpt`."""
    layers, hidden, seq = model["layers"], model["hidden_size"], model["max_seq_length"]
    matrices = 12 * layers * hidden**2 + hidden * model["vocab_size"]
    return int(6 * matrices + 12 * layers * hidden * seq)


def mfu(tokens_per_second: float, model: dict[str, Any], peak: Peak) -> float:
    """The share of `peak` that training `model` at this speed uses."""
    return tokens_per_second * flops_per_token(model) / peak.flops


def peak_of(device: torch.device, size: int = 8192) -> Peak:
    """The peak in the data sheet; for an unknown device, the speed of a product of two `size` x `size` matrices."""
    name = device_name(device)
    known = known_peak(name)
    if known is not None:
        return Peak(known, f"{name}'s data sheet")
    return Peak(measured_peak(device, size), f"measured, a product of {size} x {size} matrices on {name}")


def known_peak(name: str) -> float | None:
    """The peak of a GPU that torch calls `name`. (A GH200 is not an H200.)"""
    return next((peak for key, peak in PEAKS.items() if re.search(rf"\b{key}\b", name)), None)


def measured_peak(device: torch.device, size: int) -> float:
    """FLOP/s of products in bf16, after a warm-up."""
    one, other = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        one @ other
    begin = mark(device)
    for _ in range(_PRODUCTS):
        one @ other
    return 2 * size**3 * _PRODUCTS / seconds_between(begin, mark(device))
