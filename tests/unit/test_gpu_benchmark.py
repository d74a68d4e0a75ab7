"""What can be tried without a GPU of the benchmark and the script for one: arithmetic, a tiny run, what is asked for."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import gpu
import pytest
import torch
import torch.distributed as dist
from hpctrain_plugins.model.gpt import GPTModule, GPTOptions
from mfu import Peak, flops_per_token, known_peak, measured_peak, mfu, peak_of
from torch import nn

from hpctrain.base.devices import accelerator

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "tests" / "gpu" / "run.sh"


def test_flops_of_a_token() -> None:
    small = {"hidden_size": 2, "layers": 1, "attention_heads": 1, "vocab_size": 3, "max_seq_length": 4}
    assert flops_per_token(small) == 6 * (12 * 4 + 2 * 3) + 12 * 2 * 4
    tiny = gpu.SIZES["tiny"]
    linear = [one for one in GPTModule(GPTOptions(**tiny)).modules() if isinstance(one, nn.Linear)]
    attention = 12 * tiny["layers"] * tiny["hidden_size"] * tiny["max_seq_length"]
    assert flops_per_token(tiny) == 6 * sum(one.weight.numel() for one in linear) + attention


def test_mfu_and_the_sizes() -> None:
    large = gpu.SIZES["large"]
    assert mfu(60_000, large, Peak(989e12, "")) == pytest.approx(60_000 * 6.25528e9 / 989e12)
    with torch.device("meta"):
        sizes = {
            name: sum(p.numel() for p in GPTModule(GPTOptions(**size)).parameters()) for name, size in gpu.SIZES.items()
        }
    assert sizes["large"] == pytest.approx(1e9, rel=0.05) and sizes["middle"] == pytest.approx(0.25e9, rel=0.05)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12), ("NVIDIA H200 NVL", 835e12), ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12), ("NVIDIA GH200 480GB", None), ("NVIDIA A10", None), ("cpu", None),
    ],
)  # fmt: skip
def test_peaks_by_name(name: str, peak: float | None) -> None:
    assert known_peak(name) == peak


def test_an_unknown_device_is_measured() -> None:
    cpu = torch.device("cpu")
    assert 1e6 < measured_peak(cpu, 64) < 1e14
    assert peak_of(cpu, 64).source == "measured, a product of 64 x 64 matrices on cpu"


def run_benchmark(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *words],
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.nightly
def test_stages_against_the_plain_loop_on_a_cpu() -> None:
    done = run_benchmark("stages", "--tiny", "--device", "cpu", "--rounds", "3")
    assert done.returncode == 0, done.stderr
    first, peak, plain, *stages = done.stdout.splitlines()
    assert first.startswith("stages: 30,080 parameters, 8 x 16 tokens a step, on cpu") and "measured" in peak
    assert plain.startswith("plain torch") and [line.split("  ")[0] for line in stages] == [
        f"stage {n}" for n in range(4)
    ]
    apart = [float(line.rpartition(" ")[2]) for line in stages]
    assert max(apart) < 1e-3, "bf16 adds in float32, and the clip is summed in another order"


@pytest.mark.thorough
@pytest.mark.skipif(accelerator() is not None, reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so() -> None:
    done = run_benchmark("train")
    assert done.returncode == 2 and "there is no GPU that torch can use" in done.stderr


def test_the_script_says_how_it_is_used() -> None:
    done = subprocess.run(["bash", str(SCRIPT)], capture_output=True, text=True, timeout=20)
    assert done.returncode == 2
    assert all(f"bash tests/gpu/run.sh {word}" in done.stderr for word in ("wheels", "tests", "benchmarks")), (
        done.stderr
    )


def test_the_script_fetches_what_is_needed_but_torch(tmp_path: Path) -> None:
    """With a python3 whose pip says what it was asked for."""
    fake = tmp_path / "python3"
    fake.write_text(
        f'#!/bin/sh\n[ "$2" = pip ] || exec {sys.executable} "$@"\necho "$@" >{tmp_path}/asked\ncat >{tmp_path}/needed\n'
    )
    fake.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(SCRIPT), "wheels", "3.12"], env=environment, capture_output=True, text=True, timeout=30
    )
    asked, needed = (tmp_path / "asked").read_text(), (tmp_path / "needed").read_text().split()
    assert "--python-version 3.12" in asked and "--platform=manylinux_2_28_x86_64" in asked, done.stderr
    names = {one.partition(">")[0].partition("<")[0] for one in needed}
    assert {"pluggy", "pydantic", "tomli", "h5py", "torchao", "pytest", "pytest-timeout", "hypothesis"} <= names
    assert "torch" not in names


def test_an_older_torch_gets_what_it_lacks_and_others_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    supplier, before = str(ROOT / "tests" / "gpu" / "older_torch.py"), dist.all_gather_single
    runpy.run_path(supplier)
    assert dist.all_gather_single is before
    monkeypatch.delattr(dist, "all_gather_single")
    runpy.run_path(supplier)
    assert dist.all_gather_single is dist.all_gather_into_tensor
    monkeypatch.setattr(dist, "all_gather_single", before)
