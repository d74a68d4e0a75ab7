"""This process's memory, for the row of a step and for programs."""

from __future__ import annotations

import os
import resource
import sys
from functools import cache

import psutil  # type: ignore[import-untyped]
import torch

from hpctrain.base.devices import accelerator, is_accelerator, memory_on

KINDS = ("memory", "allocated", "reserved", "fragmented", "host")
"""Keys of a row without `_bytes`; the first one is the peak."""


_process = cache(psutil.Process)  # to make one takes a millisecond; a forked rank has another process than its server


def process_bytes() -> tuple[int, int]:
    """Bytes of this process in memory, at its peak and now. The system takes up to a millisecond to tell."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024, int(_process(os.getpid()).memory_info().rss)


def memory_of(device: torch.device, peak: int, resident: int) -> list[int]:
    """Bytes by kind, those on an accelerator zero on the CPU. peak, resident: of `process_bytes`."""
    return [*memory_on(device), resident] if is_accelerator(device) else [peak, 0, 0, 0, resident]


def memory(device: torch.device | str | None = None) -> dict[str, int]:
    """Bytes of this process by the names that a row of metrics.jsonl has: `memory_bytes`, the peak, and `host_bytes`; on an
    accelerator `allocated_bytes`, `reserved_bytes` and `fragmented_bytes`, too.

    device: None for the current accelerator, or the CPU if there is none. In a training the peak is that since the newest row.
    """
    kind = accelerator()
    here = torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())
    found = zip(KINDS, memory_of(here if device is None else torch.device(device), *process_bytes()), strict=True)
    return {f"{name}_bytes": value for name, value in found if value}
