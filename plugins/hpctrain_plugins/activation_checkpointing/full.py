"""`none` keeps every activation; `full` keeps a block's input only and computes the block again in backward
(Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from hpctrain.api import ActivationCheckpointing, Field, ModelSpec, Options, hookimpl
from hpctrain_plugins.activation_checkpointing.blocks import blocks_of


class FullOptions(Options):
    every: int = Field(default=1, ge=1, description="compute every n-th block again; the others keep their activations")
    offload: bool = Field(default=False, description="keep the blocks' inputs in host memory until backward")


class Keep(ActivationCheckpointing):
    """Keep every activation."""

    name = "none"

    def apply(self, module: nn.Module, spec: ModelSpec) -> None:
        return


class Full(ActivationCheckpointing):
    """Recompute blocks in backward."""

    name = "full"
    Options = FullOptions
    options: FullOptions

    def apply(self, module: nn.Module, spec: ModelSpec) -> None:
        blocks = blocks_of(module, spec, self.name)
        run = partial(checkpoint, use_reentrant=False)
        for block in blocks[:: self.options.every]:
            # the bound method is replaced, not the module wrapped: parameter names stay as they are
            block.forward = partial(_offloaded if self.options.offload else run, block.forward)


def _offloaded(forward: Callable[..., Any], *inputs: Any) -> Any:
    # what checkpoint saves are the inputs; what it computes again is not saved by these hooks
    with save_on_cpu(pin_memory=torch.cuda.is_available()):
        return checkpoint(forward, *inputs, use_reentrant=False)


@hookimpl
def hpctrain_activation_checkpointing() -> list[type[ActivationCheckpointing]]:
    return [Keep, Full]
