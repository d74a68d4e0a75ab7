"""This rank's memory, for the row of a step."""

from __future__ import annotations

import resource
import sys

import psutil  # type: ignore[import-untyped]
import torch

from hpctrain.base.devices import is_accelerator, memory_since

KINDS = ("memory", "allocated", "reserved", "fragmented", "host")
"""Keys of a row without `_bytes`; the first one is the peak."""
_PROCESS = psutil.Process()


def memory_of(device: torch.device) -> list[int]:
    """Bytes by kind, those on an accelerator zero on the CPU; the accelerator's next peak is one from here on."""
    resident = int(_PROCESS.memory_info().rss)
    if is_accelerator(device):
        return [*memory_since(device), resident]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return [peak if sys.platform == "darwin" else peak * 1024, 0, 0, 0, resident]
