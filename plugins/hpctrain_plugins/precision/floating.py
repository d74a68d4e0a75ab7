"""fp64, fp32, bf16 and `auto`: modes without loss scaling."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from hpctrain.api import Machine, Precision, allow_tf32, device_name, hookimpl, is_accelerator, takes_bf16


class FP64(Precision):
    """Everything in float64: slow, for proofs."""

    name = "fp64"

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float64

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext()


class FP32(Precision):
    """Everything in float32."""

    name = "fp32"

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float32

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        allow_tf32(device, False)  # by default torch uses tf32 in convolutions, and a tf32 job may have run before
        return nullcontext()


class BF16(FP32):
    """Matrix products in bfloat16 (autocast); parameters, gradients and optimizer state in float32."""

    name = "bf16"

    def missing(self, machine: Machine) -> str | None:
        device = machine.device
        if device is not None and not takes_bf16(device):
            return f"{device_name(device)} has no bfloat16; use fp16 or fp32"
        return None

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16)


class AutoPrecision(FP32):
    """bf16 on GPUs that support it, fp32 elsewhere."""

    name = "auto"

    def describe(self, device: torch.device) -> str:
        return f"{'bf16' if _takes_bf16(device) else 'fp32'} (auto)"

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16) if _takes_bf16(device) else nullcontext()


def _takes_bf16(device: torch.device) -> bool:
    return is_accelerator(device) and takes_bf16(device)


@hookimpl
def hpctrain_precision() -> list[type[Precision]]:
    return [FP64, FP32, BF16, AutoPrecision]
