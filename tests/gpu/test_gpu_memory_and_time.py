"""hpctrain's figures of a GPU's memory and time, and its means to save memory there."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hpctrain_plugins.parallelism.pipeline.stopwatch import Stopwatch
from on_gpu import DEVICE, SAME_DEVICE, job, losses, needs_gpu, plain, trained
from torch import nn

from hpctrain.api import hookimpl, without_trace
from hpctrain.base import devices

pytestmark = [needs_gpu, pytest.mark.timeout(180)]

MIDDLING: dict[str, Any] = {
    "job": {"steps": 3},
    "model": {"hidden_size": 256, "layers": 8, "attention_heads": 4, "vocab_size": 256, "max_seq_length": 256},
    "batch": {"global_size": 16, "micro_size": 16},
}
"""6.5 million parameters. A block's input is 4 MiB, and its activations are about 20 times as much."""
INPUT = 16 * 256 * 256 * 4
PARAMETERS = 6_515_200


def peak(rows: list[dict[str, Any]]) -> int:
    return max(int(row["memory_bytes"]["rank_max"]) for row in rows)


def test_memory_in_the_metrics_is_torch_s(tmp_path: Path) -> None:
    rows = trained(job(tmp_path, **MIDDLING))
    found = [row["memory_bytes"] for row in rows]
    assert all(one["rank_max"] == one["rank_mean"] for one in found), "of one rank"
    assert peak(rows) > 16 * PARAMETERS, "parameters, gradients and two moments in float32"
    for row in rows:
        kinds = [row[f"{kind}_bytes"]["rank_max"] for kind in ("allocated", "memory", "reserved")]
        assert kinds == sorted(kinds) and row["host_bytes"]["rank_max"] > 0, row
    torch.accelerator.reset_peak_memory_stats()  # that of each row ends with it
    plain(job(tmp_path, **MIDDLING))
    assert peak(rows) < 1.25 * torch.accelerator.max_memory_allocated(), "a plain loop's"


def test_checkpointing_and_offload_save_memory(tmp_path: Path) -> None:
    modes: dict[str, dict[str, Any]] = {
        "none": {"mode": "none"}, "full": {"mode": "full"}, "offload": {"mode": "full", "offload": True},
    }  # fmt: skip
    rows = {
        name: trained(job(tmp_path / name, **MIDDLING, activation_checkpointing=mode)) for name, mode in modes.items()
    }
    for name in ("full", "offload"):
        assert losses(rows[name]) == pytest.approx(losses(rows["none"]), rel=SAME_DEVICE)
    assert peak(rows["full"]) < peak(rows["none"]) - 50 * INPUT
    assert peak(rows["offload"]) < peak(rows["full"]) - 4 * INPUT, "most of the eight inputs are in host memory"


@pytest.mark.parametrize(("stage", "option"), [(1, "offload_optimizer"), (3, "offload_parameters")])
def test_sharding_offload_saves_memory(tmp_path: Path, stage: int, option: str) -> None:
    # one sample, so that the optimizer's state outweighs the activations
    small = {**MIDDLING, "batch": {"global_size": 1, "micro_size": 1}}
    here = trained(job(tmp_path / "here", **small, sharding={"stage": stage}))
    there = trained(job(tmp_path / "there", **small, sharding={"stage": stage, option: True}))
    assert losses(there) == pytest.approx(losses(here), rel=SAME_DEVICE)
    assert peak(there) < peak(here) - 6 * PARAMETERS, "two moments of 4 bytes each, at least"


def test_what_rank_0_gets_is_the_current_device() -> None:
    devices.use_device(DEVICE)
    assert torch.accelerator.current_device_index() == DEVICE.index == 0
    assert devices.accelerator_count() == torch.accelerator.device_count() >= 1
    assert devices.device_name(DEVICE) not in ("", DEVICE.type)
    assert torch.empty(1, device=DEVICE.type).device == DEVICE


def work() -> None:
    """Keeps the GPU busy for a while without blocking the program."""
    matrix = torch.ones(4096, 4096, device=DEVICE)
    for _ in range(20):
        matrix = matrix @ matrix / 4096


def test_the_system_knows_the_address_of_the_gpu() -> None:
    """It says there to which NUMA node the GPU is connected."""
    address = devices.pci_address(torch.device("cuda", 0))
    assert address is not None and (Path("/sys/bus/pci/devices") / address / "numa_node").exists()


def test_a_stopwatch_times_the_stream_and_not_the_program() -> None:
    work()
    torch.accelerator.synchronize()
    watch = Stopwatch(DEVICE, lambda name: pytest.fail(name))
    begin = time.perf_counter()
    with watch.computing():
        work()
    launched = time.perf_counter() - begin
    watch.stop()
    torch.accelerator.synchronize()
    seconds = time.perf_counter() - begin
    computed, whole = watch.seconds()
    assert launched < seconds, "nothing waited"
    assert computed == pytest.approx(seconds, rel=0.3) and computed <= whole == pytest.approx(seconds, rel=0.3)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_step_waits_for_the_gpu_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    """torch warns of each wait; the first steps try what plugins promise."""
    waits: list[str] = []
    of_steps: list[list[str]] = []

    @hookimpl
    def hpctrain_step_end(step: int) -> None:
        of_steps.append(waits.copy())
        waits.clear()

    plugin = ModuleType("counting_waits")
    plugin.hpctrain_step_end = hpctrain_step_end  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, plugin.__name__, plugin)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(
            warnings, "showwarning", lambda said, *_: "synchroniz" in str(said) and waits.append(str(said))
        )
        torch.cuda.set_sync_debug_mode("warn")
        try:
            trained(job(tmp_path, sharding={"stage": stage}, plugins={"load": [plugin.__name__]}))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len(of_steps) == 8 and max(len(one) for one in of_steps[2:]) == 1, of_steps


def test_random_numbers_and_buffers_are_as_if_nothing_had_been() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)).to(DEVICE)
    torch.manual_seed(1)
    expected = torch.rand(8, device=DEVICE), torch.rand(8)
    torch.manual_seed(1)
    with without_trace(module, DEVICE):
        module(torch.rand(16, 4, device=DEVICE))
        torch.rand(3)
    assert torch.equal(torch.rand(8, device=DEVICE), expected[0]) and torch.equal(torch.rand(8), expected[1])
    norm = module[0]
    assert isinstance(norm, nn.BatchNorm1d) and norm.running_mean is not None and not norm.running_mean.any()
