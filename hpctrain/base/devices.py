"""The devices that ranks compute on: the accelerators of a machine, or its CPU.

Only this file distinguishes kinds of devices. It asks `torch.accelerator` and torch's module for each kind
(`torch.get_device_module`), so an accelerator of another vendor that torch supports needs no change here. The part that
is specific to NVIDIA is at the end.

Imports only torch. Plugins find these functions in hpctrain.api.
"""

from __future__ import annotations

import ctypes
import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

__all__ = ["nccl_version"]

# files of drivers, the vendor, and what torch must be built with
_SYSTEM_FILES = (("/dev/nvidia0", "an NVIDIA GPU", "CUDA"), ("/dev/kfd", "an AMD GPU", "ROCm"))


def accelerator() -> torch.device | None:
    """The kind of accelerator that torch can use on this machine; None if it can use only the CPU."""
    return torch.accelerator.current_accelerator(check_available=True)


def unusable_accelerator() -> str | None:
    """Why torch can't use an accelerator that the system has; None if it has none, or torch can use it."""
    if accelerator() is not None:
        return None
    for file, vendor, build in _SYSTEM_FILES:
        if Path(file).exists():
            has = (
                "its driver does not answer"
                if torch.accelerator.current_accelerator() is not None
                else f"it has no {build}"
            )
            return f"{vendor} that this torch can't use ({has})"
    return None


def accelerator_count() -> int:
    """The number of accelerators that this process sees."""
    return torch.accelerator.device_count()


def device_of_rank(local_rank: int) -> torch.device:
    """The accelerator of a local rank, or the CPU if there is none. If there are fewer than ranks, ranks share them."""
    kind = accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type, local_rank % accelerator_count())


def is_accelerator(device: torch.device) -> bool:
    """Whether `device` computes, and copies to and from pinned host memory, asynchronously to the program."""
    return device.type not in ("cpu", "meta")


def use_device(device: torch.device) -> None:
    """Make this thread compute on `device`: each thread has its own current accelerator."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor of the CPU on `device`, for which the program does not wait; on the CPU the tensor itself."""
    if not is_accelerator(device) or is_accelerator(tensor.device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def device_name(device: torch.device) -> str:
    """The vendor's name of the device, for messages."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))


def pci_address(device: torch.device) -> str | None:
    """The address of an accelerator on its bus, such as "0000:65:00.0"; None for the CPU and where torch can't tell."""
    if not is_accelerator(device):
        return None
    properties: Any = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    if not hasattr(properties, "pci_bus_id"):
        return None
    return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"


def has_float64(device: torch.device) -> bool:
    """Whether `device` computes in float64, in which losses are summed: Apple's and some of Intel's don't."""
    properties: Any = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)(device)
    return device.type != "mps" and bool(getattr(properties, "has_fp64", True))


def takes_bf16(device: torch.device) -> bool:
    """Whether `device` has bfloat16 in hardware; true for kinds of devices without a check in torch."""
    supported = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    if supported is None:
        return True
    # by default torch says yes of a GPU that emulates it, several times slower than float32
    emulated = "including_emulation" in inspect.signature(supported).parameters
    return bool(supported(including_emulation=False) if emulated else supported())


def memory_on(device: torch.device) -> tuple[int, int, int, int]:
    """Bytes of this process on an accelerator: the peak of its tensors, what they take, what torch holds, and of that what it
    can't use because tensors split it."""
    found = torch.accelerator.memory_stats(device)
    names = ("allocated_bytes.all.peak", "allocated_bytes.all.current", "reserved_bytes.all.current")
    peak, allocated, reserved = (int(found.get(name, 0)) for name in names)
    split = int(found.get("inactive_split_bytes.all.current", 0))
    return peak, allocated, reserved, split


def begin_peak(device: torch.device) -> None:
    """The next peak of an accelerator's memory is one from here on."""
    if is_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)


def memory_left(device: torch.device) -> tuple[int, int] | None:
    """The bytes of an accelerator's memory that are free, and all of them; None for the CPU and where torch can't tell."""
    if not is_accelerator(device):
        return None
    try:
        return torch.accelerator.get_memory_info(device)
    except (RuntimeError, NotImplementedError, AttributeError):
        return None


def forked_random_state(device: torch.device) -> AbstractContextManager[None]:
    """Random numbers drawn inside, on the CPU or on `device`, do not affect those drawn afterwards."""
    return torch.random.fork_rng([device] if is_accelerator(device) else [], device_type=device.type)


def seed_draws(seed: int, device: torch.device) -> None:
    """Random numbers of the CPU and of `device`, this thread's current one, follow from `seed` from now on.

    torch.manual_seed looks for accelerators of every kind each time, which takes 200 times as long.
    """
    torch.default_generator.manual_seed(seed)
    if is_accelerator(device):
        module: Any = torch.get_device_module(device)
        (module.manual_seed if hasattr(module, "manual_seed") else module.manual_seed_all)(seed)


def draws_state(device: torch.device) -> bytes:
    """The state of the random numbers of the CPU and of `device`, to compare with."""
    states = [torch.get_rng_state()]
    if is_accelerator(device):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return b"".join(
        ctypes.string_at(one.data_ptr(), one.nbytes) for one in states
    )  # by no operator: a plan's give no values


def mark(device: torch.device) -> Any:
    """A point in time on `device`, for `seconds_between`. On an accelerator: when its current stream gets here; this call does
    not wait for it."""
    if not is_accelerator(device):
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Any, end: Any) -> float:
    """The seconds between two marks of one device; waits for the later one."""
    if isinstance(end, float):
        return float(end - begin)
    end.synchronize()
    return float(begin.elapsed_time(end) / 1000)


def profiler_ranges(device: torch.device) -> tuple[Callable[[str], object], Callable[[], object]] | None:
    """Functions that begin a named range and end the newest one, as profilers of the device's vendor show them: NVTX on NVIDIA's,
    ROCTX on AMD's. None where torch has none."""
    found: Any = getattr(torch.get_device_module(device), "nvtx", None) if is_accelerator(device) else None
    return None if found is None else (found.range_push, found.range_pop)


# Specific to NVIDIA: other vendors have neither these formats nor these numbers.


def is_started() -> bool:
    """Whether torch has started an accelerator in this process: a forked one could not use it."""
    kind = torch.accelerator.current_accelerator()
    return kind is not None and bool(getattr(torch.get_device_module(kind), "is_initialized", bool)())


def has_cuda_operators(device: torch.device) -> bool:
    """Whether torch's operators for CUDA serve the device: NVIDIA's and AMD's."""
    return device.type == "cuda"


def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU, such as (9, 0); None for every other device.

    torch calls AMD's GPUs "cuda", too, and gives the numbers of their own architectures: an MI250 has (9, 0).
    """
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.version.hip is None else None


def allow_tf32(device: torch.device, allowed: bool) -> None:
    """Whether an NVIDIA GPU may round the inputs of float32 products and convolutions to 10 bits. Holds until changed."""
    if device.type == "cuda":
        # torch.backends.fp32_precision alone would contradict these settings, and torch raises when its own code reads them
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


@contextmanager
def deterministic_cudnn() -> Iterator[None]:
    """Leave out cuDNN's search for the fastest kernel, and its attention, whose backward sums in any order, in this context."""
    searches, attention = torch.backends.cudnn.benchmark, torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(attention)
        torch.backends.cudnn.benchmark = searches


def nccl_version() -> int:
    """NCCL's version as a number such as 22703; 0 without an NVIDIA GPU."""
    device = accelerator()
    if device is None or device.type != "cuda":
        return 0
    major, minor, patch = torch.cuda.nccl.version()[:3]
    return int(major * 10000 + minor * 100 + patch)
