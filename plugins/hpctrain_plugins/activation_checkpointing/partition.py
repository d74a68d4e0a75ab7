"""Partitions an activation that several ranks hold: each keeps a part until backward, where they gather it again
(Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, section 6.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpctrain_plugins.activation_checkpointing.offload import HostMemory


@dataclass(frozen=True)
class Share:
    """A rank's equal share of a flattened tensor. The last shares may be padded with zeros."""

    values: Any
    """A tensor, or what HostMemory keeps of it."""
    shape: torch.Size


class Partition:
    """Hooks for `torch.autograd.graph.saved_tensors_hooks`, for tensors that are equal on all ranks of `group`."""

    def __init__(self, group: dist.ProcessGroup, memory: HostMemory | None) -> None:
        """memory: where to keep the parts, if not on their device."""
        self._group, self._memory = group, memory

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Any:
        """This rank's part of an activation; other tensors (a mask, positions) unchanged."""
        if not tensor.requires_grad or isinstance(tensor, DTensor):
            return tensor
        share = -(-tensor.numel() // self._group.size())
        mine = tensor.reshape(-1)[self._group.rank() * share :][:share]
        values = mine.new_zeros(share)
        values[: len(mine)] = mine
        return Share(values if self._memory is None else self._memory.keep(values), tensor.shape)

    @torch.no_grad()
    def unpack(self, packed: Any) -> Tensor:
        """The full tensor. Collective over the group."""
        if not isinstance(packed, Share):
            return packed  # type: ignore[no-any-return]
        mine: Tensor = packed.values if self._memory is None else self._memory.bring(packed.values)
        whole = mine.new_empty(len(mine) * self._group.size())
        dist.all_gather_single(whole, mine, group=self._group)
        return whole[: packed.shape.numel()].view(packed.shape)
