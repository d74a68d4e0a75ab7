"""`adamw-8bit`: AdamW with one-byte moments (Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022).

torchao does the arithmetic. It quantizes tensors of at least 4096 elements, if 256 divides their number; others stay float32.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from hpctrain.api import EXIT_ENVIRONMENT, Optimizer, Options, Plan, Problem, hookimpl
from hpctrain_plugins.optimizer.torch_optimizers import AdamWOptions


class AdamW8bit(Optimizer):
    """AdamW with 8-bit state, from torchao: 2 bytes per parameter in place of 8."""

    name = "adamw-8bit"
    Options: ClassVar[type[Options]] = AdamWOptions

    def problems(self, plan: Plan) -> list[Problem]:
        if find_spec("torchao") is not None:
            return []
        return [Problem("torchao is not installed; pip install 'hpctrain[adamw-8bit]'", exit_code=EXIT_ENVIRONMENT)]

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        # torchao warns of each GPU kernel that it can't load
        logging.getLogger("torchao").setLevel(logging.ERROR)
        from torchao.optim import AdamW8bit as Quantized

        class WithPlainRates(Quantized):  # type: ignore[misc]
            """Takes learning rates as numbers, as every other optimizer does; torchao's are tensors."""

            @torch.no_grad()
            def step(self, closure: Any = None) -> Any:
                rates = [float(group["lr"]) for group in self.param_groups]
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = torch.tensor(rate, dtype=torch.float32)
                with _execution(self.param_groups):
                    loss = super().step(closure)
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate
                return loss

        rates = [group.get("lr", self.options.lr) for group in groups]
        optimizer: torch.optim.Optimizer = WithPlainRates(groups, **self.options.model_dump())
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return optimizer


def _execution(groups: list[dict[str, Any]]) -> AbstractContextManager[Any]:
    """The context of a step: compiled on GPUs, as in torchao. On a CPU, each shape would cost every rank seconds of C++
    compilation."""
    on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])
    return torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()


@hookimpl
def hpctrain_optimizer() -> list[type[Optimizer]]:
    return [AdamW8bit]
