"""Keeps the optimizer's tensors in host memory while a GPU computes."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

LOG = logging.getLogger("hpctrain")


def host_copy(tensor: Tensor, pin_memory: bool) -> Tensor:
    """A copy of `tensor` in host memory. pin_memory: copies are faster, and the memory is never swapped out."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin_memory)
    return copy.copy_(tensor)


def is_needed(asked: bool, device: torch.device) -> bool:
    """Whether there is anything to offload from `device`."""
    return asked and device.type != "cpu"


def warn_if_useless(asked: bool, device: torch.device) -> None:
    """Warn a job that asks for offload on CPU ranks."""
    if asked and device.type == "cpu":
        LOG.warning("[sharding] offload: it saves no memory, because the ranks compute on CPUs")
