"""The devices that ranks compute on: the accelerators of a machine, or its CPU.

No other file tells one kind of device from another. This one asks `torch.accelerator` and the module that torch has for
each kind (`torch.get_device_module`): an accelerator of another maker that torch knows needs no change here. What is
NVIDIA's own is at the end.

It imports torch only. hpctrain.api has what plugins need.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

import torch


def accelerator() -> torch.device | None:
    """The kind of accelerator that torch can use on this machine; None where it can use the CPU only."""
    return torch.accelerator.current_accelerator(check_available=True)


def accelerator_count() -> int:
    """How many of that kind this process sees."""
    return torch.accelerator.device_count()


def device_of_rank(local_rank: int) -> torch.device:
    """The accelerator of a node's rank; the CPU where there is none. Ranks take turns where there are fewer than ranks."""
    kind = accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type, local_rank % accelerator_count())


def is_accelerator(device: torch.device) -> bool:
    """Whether work on `device` runs beside the program, and copies between it and pinned host memory, too."""
    return device.type not in ("cpu", "meta")


def use_device(device: torch.device) -> None:
    """Let this thread compute on `device`: which one of several accelerators is current is each thread's own."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def device_name(device: torch.device) -> str:
    """What its maker calls it, for messages."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def takes_bf16(device: torch.device) -> bool:
    """Whether `device` computes in bfloat16. A kind of device that torch doesn't ask about does."""
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return supported is None or bool(supported())


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors of this process have taken at a time on an accelerator."""
    return torch.accelerator.max_memory_allocated(device)


def forked_random_state(device: torch.device) -> AbstractContextManager[None]:
    """What is drawn inside, on the CPU or on `device`, leaves no trace in what is drawn afterwards."""
    return torch.random.fork_rng([device] if is_accelerator(device) else [], device_type=device.type)


def mark(device: torch.device) -> Any:
    """A moment in the work of `device`, for `seconds_between`: on an accelerator the one when its current stream gets here.
    Nothing waits for that."""
    if not is_accelerator(device):
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """Between two marks of one device; waits for the later one."""
    if isinstance(end, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end) / 1000)


# NVIDIA's own: other makers have neither these formats nor these numbers.


def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU, such as (9, 0); None for every other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def allow_tf32(device: torch.device, allowed: bool) -> None:
    """Whether an NVIDIA GPU may round what float32 products and convolutions take to 10 bits. Holds until said otherwise."""
    if device.type == "cuda":
        # torch.backends.fp32_precision alone would contradict these: torch then raises where its own code asks for them
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
