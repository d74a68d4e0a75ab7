"""Keeps the optimizer's tensors in host memory while a GPU computes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.api import copy_to_host

LOG = logging.getLogger("hpctrain")


def host_copy(tensor: Tensor, pin_memory: bool) -> Tensor:
    """A copy of `tensor` in host memory. pin_memory: for faster copies; the memory is never swapped out."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory)
    return copy.copy_(tensor)


def is_needed(asked: bool, device: torch.device) -> bool:
    """Whether there is anything to offload from `device`."""
    return asked and device.type != "cpu"


def warn_if_useless(asked: bool, device: torch.device) -> None:
    """Warn a job that asks for offload on CPU ranks."""
    if asked and device.type == "cpu":
        LOG.warning("[sharding] offload: it saves no memory, because the ranks compute on CPUs")


class HostGradients:
    """Host memory for the gradients of a step, and for those of a backward that are added to them."""

    def __init__(self, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._kept: dict[bool, list[Tensor]] = {}

    def bring(self, gradients: Sequence[Tensor], first: bool) -> list[Tensor]:
        """The gradients of a backward in host memory, valid until the next call with the same `first`.

        first: whether it is the first backward of a step.
        """
        if first not in self._kept:  # once: to pin memory takes longer than to fill it
            self._kept[first] = [
                torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=self._pin_memory) for gradient in gradients
            ]
        copy_to_host(self._kept[first], gradients)  # all copies together: one wait for the device
        return self._kept[first]
