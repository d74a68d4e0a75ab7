"""`none` keeps every activation; `full` keeps only a block's input and computes the block again in backward
(Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from hpctrain.api import ActivationCheckpointing, Field, ModelSpec, Options, Plan, Problem, hookimpl
from hpctrain_plugins.activation_checkpointing.blocks import FULL, BlockBuffers, blocks_of

LOG = logging.getLogger("hpctrain")


class FullOptions(Options):
    every: int = Field(default=1, ge=1, description="compute every n-th block again; the others keep their activations")
    offload: bool = Field(default=False, description="keep the blocks' inputs in host memory until backward")
    partition_activations: bool = Field(
        default=False,
        description="each tensor-parallel rank keeps its part of a block's input, and gathers it in backward",
    )


class Keep(ActivationCheckpointing):
    """Keep every activation."""

    name = "none"

    def apply(self, module: nn.Module, spec: ModelSpec, replicas: DeviceMesh | None) -> None:
        return

    def memory_advice(self, ranks: int, device: torch.device) -> list[str]:
        return [FULL]


class Full(ActivationCheckpointing):
    """Recompute blocks in backward."""

    name = "full"
    Options = FullOptions
    options: FullOptions

    def problems(self, plan: Plan) -> list[Problem]:
        if plan.outline is not None:
            blocks_of(plan.outline, plan.model, self.name)
        return []

    def apply(self, module: nn.Module, spec: ModelSpec, replicas: DeviceMesh | None) -> None:
        blocks, keeping = blocks_of(module, spec, self.name), self._keeping(replicas)
        for block in blocks[:: self.options.every]:
            # replaces the bound method instead of wrapping the module, so parameter names do not change
            block.forward = partial(_recomputed, keeping, BlockBuffers(block).contexts, block.forward)

    def _keeping(self, replicas: DeviceMesh | None) -> Callable[[], AbstractContextManager[object]]:
        """The context in which a block's inputs are saved."""
        if not (self.options.offload or self.options.partition_activations):
            return nullcontext
        from hpctrain_plugins.activation_checkpointing.offload import HostMemory  # here: few jobs use it
        from hpctrain_plugins.activation_checkpointing.partition import Partition

        memory = HostMemory() if self.options.offload else None
        if self.options.partition_activations and replicas is not None:
            partition = Partition(replicas.get_group(), memory)
            return partial(saved_tensors_hooks, partition.pack, partition.unpack)
        if self.options.partition_activations:
            LOG.warning(
                "[activation_checkpointing] partition_activations has no effect: no ranks hold the same inputs of blocks, as "
                "ranks of [parallelism] tensor without sequence_parallel do"
            )
        return nullcontext if memory is None else partial(saved_tensors_hooks, memory.pack, memory.bring)


def _recomputed(
    keeping: Callable[[], AbstractContextManager[object]],
    contexts: Callable[[], Any],
    forward: Callable[..., Any],
    *inputs: Any,
    **options: Any,
) -> Any:
    # checkpoint saves only the inputs; hooks from outside do not see recomputed tensors
    with keeping():
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **options)


@hookimpl
def hpctrain_activation_checkpointing() -> list[type[ActivationCheckpointing]]:
    return [Keep, Full]
