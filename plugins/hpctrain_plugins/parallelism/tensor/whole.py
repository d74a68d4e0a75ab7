"""Checks once the gradients of parameters that every rank of the axis holds whole: if they differ, the ranks diverge."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from hpctrain.api import UsageError, gather_values

# equal computations agree this well on all ranks; partial sums over different heads differ more somewhere
_TOLERANCE = 0.05


class WholeGradients:
    """The gradients of the first step's first backward, by parameter. Skips compiled blocks."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup):
        self._group = group
        self._squares: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        self._forwards: dict[str, RemovableHandle] = {}
        self.compared = False
        for name, inner in module.named_modules():
            if any(not isinstance(parameter, DTensor) for parameter in inner.parameters(recurse=False)):
                # in forward, because stage 3 gathers another tensor there
                self._forwards[name] = inner.register_forward_pre_hook(partial(self._look, name))

    def _look(self, owner: str, inner: nn.Module, inputs: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._forwards[owner].remove()  # only its own: compiled modules would be compiled again without their hooks
        for last, parameter in inner.named_parameters(recurse=False) if not self.compared else ():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                name = f"{owner}.{last}" if owner else last
                self._squares[name] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                hook = partial(self._note, name)
                self._handles.append(parameter.register_hook(hook))

    def _note(self, name: str, gradient: Tensor) -> None:
        self._squares[name] += gradient.detach().float().square().sum()

    def compare(self) -> None:
        """Raises UsageError for differing gradients."""
        self.compared = True
        for handle in self._handles:
            handle.remove()
        norms = {name: math.sqrt(square) for name, square in self._squares.items()}
        everyone = gather_values(norms, self._group)
        apart = [name for name in norms if _differ([of_rank.get(name, 0.0) for of_rank in everyone])]
        if apart:
            raise UsageError(
                f"[parallelism.tensor] plan: the gradients of {', '.join(apart[:4])}{', ...' * (len(apart) > 4)} differ between "
                'the ranks, which have these whole, but use them with a part of the heads or outputs: write "head_norm" for a norm '
                "between colwise and rowwise modules, or leave the modules around it out of the plan"
            )


def _differ(norms: list[float]) -> bool:
    return all(map(math.isfinite, norms)) and max(norms) - min(norms) > _TOLERANCE * max(norms)
