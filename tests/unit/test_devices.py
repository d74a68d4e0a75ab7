"""hpctrain/base/devices.py is the only file that knows one kind of device from another, and it knows kinds that it never met."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hpctrain_plugins.communicator.backends import NCCL, Accelerator
from hpctrain_plugins.precision.floating import BF16, AutoPrecision
from hpctrain_plugins.precision.gpu import TF32
from sources import sources

import hpctrain.api
from hpctrain.base import devices
from hpctrain.contracts import plugin
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.plugin import Options
from hpctrain.training.meters.memory import memory_of

ROOT = Path(__file__).parent.parent.parent
CPU, XPU = torch.device("cpu"), torch.device("xpu", 1)
KINDS = re.compile(r"\b(cuda|xpu|mps|hpu|npu|mtia)\b|is_cuda")
NVIDIA_OWN = {"hpctrain/base/devices.py": 11, "plugins/hpctrain_plugins/communicator/backends.py": 1}
"""Lines that name a kind of device: Apple's, which has no float64, and of NVIDIA's the capability, tf32, NCCL's groups and version,
and the one that NCCL serves."""


def test_kinds_of_devices_are_named_in_one_place() -> None:
    files = sources()
    assert len(files) > 200
    found = {
        str(file.relative_to(ROOT)): sum(bool(KINDS.search(line.partition("#")[0])) for line in file.open())
        for file in files
    }
    assert {name: lines for name, lines in found.items() if lines} == NVIDIA_OWN


@pytest.mark.thorough
def test_importing_it_takes_torch_only() -> None:
    code = "import sys, hpctrain.base.devices; print(*sorted(name for name in sys.modules if name.partition('.')[0] == 'hpctrain'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["hpctrain", "hpctrain.base", "hpctrain.base.devices", "hpctrain.version"]


def test_plugins_get_what_they_need() -> None:
    inside = {
        "deterministic_cudnn", "is_started", "memory_left", "nccl_version",
        "has_cuda_operators", "pci_address", "begin_peak", "memory_on", "draws_state", "seed_draws",
        "unusable_accelerator", "use_device", "to_device",
    }  # fmt: skip
    public = {name for name, one in vars(devices).items() if getattr(one, "__module__", "") == devices.__name__}
    assert public - inside <= set(hpctrain.api.__all__) and not inside & set(hpctrain.api.__all__)


def test_a_cpu() -> None:
    assert not devices.is_accelerator(CPU) and not devices.is_accelerator(torch.device("meta"))
    assert devices.device_name(CPU) == "cpu" and devices.takes_bf16(CPU)
    devices.use_device(CPU)
    assert devices.memory_left(CPU) is None and devices.pci_address(CPU) is None
    begin = devices.mark(CPU)
    time.sleep(0.01)
    assert 0.01 <= devices.seconds_between(begin, devices.mark(CPU)) < 5
    with devices.forked_random_state(CPU):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), first)
    assert devices.nvidia_capability(CPU) is None
    before = torch.backends.cuda.matmul.allow_tf32
    devices.allow_tf32(CPU, not before)
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert devices.accelerator() is None and devices.device_of_rank(3) == CPU
    assert NCCL(Options()).missing(plugin.Machine(Identity())) == "there is no GPU that torch can use"


class Event:
    """An event of a stream that is half a second further at each."""

    now = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.synchronized = False

    def record(self) -> None:
        Event.now += 500.0
        self.at = Event.now

    def synchronize(self) -> None:
        self.synchronized = True

    def elapsed_time(self, later: Event) -> float:
        assert later.synchronized
        return later.at - self.at


class Machine:
    """Two accelerators of a maker that hpctrain doesn't name."""

    def __init__(self) -> None:
        self.current: dict[int, torch.device] = {}
        self.peaks_reset: list[torch.device] = []
        self.random = {0: torch.tensor(0), 1: torch.tensor(1)}
        self.bf16, self.emulates = True, True
        self.module = SimpleNamespace(
            get_device_name=lambda device: f"Accelerator {device.index}",
            is_bf16_supported=self.supports_bf16,
            Event=Event,
            get_rng_state=lambda device: self.random[device.index].clone(),
            set_rng_state=lambda state, device: self.random[device.index].copy_(state),
        )

    def supports_bf16(self, including_emulation: bool = True) -> bool:
        return self.bf16 or (including_emulation and self.emulates)

    def set_device_index(self, device: torch.device) -> None:
        self.current[threading.get_ident()] = device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    accelerators: dict[str, Any] = {
        "current_accelerator": lambda check_available=False: torch.device("xpu"),
        "device_count": lambda: 2,
        "set_device_index": made.set_device_index,
        "memory_stats": lambda device: {
            "allocated_bytes.all.peak": 4096 + device.index,
            "reserved_bytes.all.current": 8192,
        },
        "reset_peak_memory_stats": made.peaks_reset.append,
    }
    for name, function in accelerators.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    monkeypatch.setattr(torch, "get_device_module", lambda device: made.module)
    return made


def test_an_accelerator_of_another_maker(machine: Machine) -> None:
    assert [devices.device_of_rank(rank).index for rank in range(4)] == [0, 1, 0, 1]
    assert devices.device_of_rank(1) == XPU and devices.is_accelerator(XPU)
    devices.use_device(XPU)
    assert machine.current == {threading.get_ident(): XPU}
    assert memory_of(XPU, 0, 0)[:4] == [4097, 0, 8192, 0]
    devices.begin_peak(XPU)
    assert machine.peaks_reset == [XPU]
    begin, end = devices.mark(XPU), devices.mark(XPU)
    assert devices.seconds_between(begin, end) == 0.5
    with devices.forked_random_state(XPU):
        machine.random[0].add_(10)
        machine.random[1].add_(10)
    assert machine.random == {0: torch.tensor(10), 1: torch.tensor(1)}, "the other one's is not this rank's business"
    assert devices.nvidia_capability(XPU) is None


def test_precision_and_nccl_ask_it(machine: Machine) -> None:
    assert (
        BF16(Options()).missing(plugin.Machine(Identity(), XPU)) is None
        and AutoPrecision(Options()).describe(XPU) == "bf16 (auto)"
    )
    machine.bf16 = False
    assert BF16(Options()).missing(plugin.Machine(Identity(), XPU)) == "Accelerator 1 has no bfloat16; use fp16 or fp32"
    assert AutoPrecision(Options()).describe(XPU) == "fp32 (auto)"
    assert NCCL(Options()).missing(plugin.Machine(Identity())) == "there is no GPU that torch can use"


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_a_device_without_float64_leaves_the_cpu(kind: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's, for which torch would give gloo, and Intel's that emulate none."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    one = Accelerator(Options())
    if kind == "xpu":
        assert one.missing(plugin.Machine(Identity())) is None
        machine.module.get_device_properties = lambda device: SimpleNamespace(has_fp64=False)
    assert one.missing(plugin.Machine(Identity())) == "Accelerator 0 has no float64, in which losses are summed"


@pytest.mark.parametrize(("hip", "lacks"), [(None, False), ("6.4", True)], ids=["NVIDIA", "AMD"])
def test_an_amd_gpu_is_not_judged_by_nvidias_numbers(
    hip: str | None, lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls both "cuda"; an MI250's architecture has the number 9.0."""
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    gpu = plugin.Machine(Identity(), torch.device("cuda", 0))
    why = "TensorFloat-32 needs an NVIDIA GPU, and this rank computes on a GPU; use fp32 or bf16" if lacks else None
    assert TF32(Options()).missing(gpu) == why
