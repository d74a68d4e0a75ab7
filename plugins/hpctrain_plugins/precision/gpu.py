"""Modes that need an NVIDIA GPU: tf32 and fp8."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from hpctrain.api import (
    Machine,
    ModelSpec,
    Plan,
    Precision,
    Problem,
    UsageError,
    allow_tf32,
    device_name,
    hookimpl,
    nvidia_capability,
)

_TF32_CAPABILITY, _FP8_CAPABILITY = (8, 0), (8, 9)


def _lacks(device: torch.device | None, capability: tuple[int, int], what: str) -> str | None:
    if device is None:  # not chosen yet
        return None
    found = nvidia_capability(device)
    if found is None:
        return f"{what} needs an NVIDIA GPU, and this rank computes on {device_name(device)}; use fp32 or bf16"
    if found < capability:
        return f"{device_name(device)} has no {what}; use bf16 or fp32"
    return None


class TF32(Precision):
    """float32 with matrix products and convolutions in TensorFloat-32 (10 bits of precision)."""

    name = "tf32"

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float32

    def missing(self, machine: Machine) -> str | None:
        return _lacks(machine.device, _TF32_CAPABILITY, "TensorFloat-32")

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        allow_tf32(device, True)  # for good: backward runs outside of this context
        return nullcontext()


class FP8(Precision):
    """Linear layers of the model's blocks in float8 (torchao), everything else as in bf16.

    Not the head: it is not compiled, so the conversion of its outputs' gradients takes longer than a float8 product saves.
    """

    name = "fp8"

    @property
    def parameter_dtype(self) -> torch.dtype:
        return torch.float32

    def missing(self, machine: Machine) -> str | None:
        why = _lacks(machine.device, _FP8_CAPABILITY, "float8")
        if why is None and find_spec("torchao") is None:
            return "torchao is not installed; pip install 'hpctrain[fp8]'"
        return why

    def problems(self, plan: Plan) -> list[Problem]:
        cut = [name for name, axis in plan.parallelism.items() if axis.traits.ranks_have == "the same samples"]
        if cut:  # each rank would scale by the largest value in its own part
            return [
                Problem(
                    f"float8 layers can't be cut by [parallelism] {cut[0]}; use bf16, or shard with [sharding] stage = 3"
                )
            ]
        return []

    def convert(self, module: nn.Module, spec: ModelSpec) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # the gradient of a weight is a product over the tokens of a micro batch, which may be any number
        config = Float8LinearConfig(pad_inner_dim=True)
        inside = {one for block in spec.blocks(module) or [module] for one in block.modules() if _divides(one)}
        if not inside:
            raise UsageError(
                f"[precision] mode = 'fp8': the blocks of the model {spec.name!r} have no Linear layer with sizes that are "
                "multiples of 16; use bf16"
            )
        convert_to_float8_training(module, config=config, module_filter_fn=lambda one, _: one in inside)

    def forward(self, device: torch.device) -> AbstractContextManager[Any]:
        return torch.autocast(device.type, torch.bfloat16)


def _divides(module: nn.Module) -> bool:
    """float8 products need both dims to be multiples of 16."""
    return isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0


@hookimpl
def hpctrain_precision() -> list[type[Precision]]:
    return [TF32, FP8]
