"""The measurements in a step's row: operations, memory, load, slow ranks, goodput over restarts."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from jobs import TINY, JobFile
from torch import Tensor, nn

import hpctrain
from hpctrain.contracts.dataset import Samples
from hpctrain.data.batches import Batches
from hpctrain.data.plan import Planned
from hpctrain.data.pool import Pool
from hpctrain.job.machines import machine_of_device, peak_flops_of
from hpctrain.training.meters.clock import PARTS
from hpctrain.training.meters.meters import peak_flops
from hpctrain.training.meters.stragglers import Straggler, Stragglers


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


class Net(nn.Module):
    """A convolution (3 to 4 channels, 3 x 3, on 8 x 8) and a head (256 to 10), whose trunk may be computed again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten()), nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.utils.checkpoint.checkpoint(self.trunk, x, use_reentrant=False))


class Slow(Samples):
    draws = True  # so that none is read twice

    def __len__(self) -> int:
        return 9

    def fingerprint(self) -> str:
        return ""

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.02)
        return torch.tensor([index])


class Images:
    def __init__(self, split: str, seed: int = 0) -> None:
        self.x = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], index % 10


def rows(directory: str = "out") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in Path(directory, "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "loss" in row]


def test_the_operations_of_any_module_are_counted_by_torch() -> None:
    tables = {
        "job": {"name": "net", "steps": 4, "output_dir": "out"},
        "model": {"name": Net, "loss": nn.functional.cross_entropy},
        "dataset": {"name": Images},
        "optimizer": {"name": "sgd", "lr": 0.01},
        "batch": {"global_size": 6, "micro_size": 3},
    }
    hpctrain.run(tables)
    # 2 x inputs of an output x outputs, three times: forward, and backward by inputs and by parameters
    wanted = 6 * 3 * 2 * (3 * 9 * 4 * 64 + 256 * 10)
    for row in rows():
        assert row["model_flops_per_second"] * row["step_seconds"] == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("counted", [True, False])
def test_torch_s_count_of_gpt_is_the_formula_s(counted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpctrain_plugins.model.gpt import GPT

    if counted:
        monkeypatch.setattr(GPT, "flops", lambda *_: None)
    hpctrain.run(json.loads(json.dumps(TINY)))
    size = TINY["model"]
    hidden, seq = size["hidden_size"], size["max_seq_length"]
    matrices = 12 * size["layers"] * hidden**2 + hidden * size["vocab_size"]
    wanted = 12 * seq * (6 * matrices + 12 * size["layers"] * hidden * seq)
    for row in rows():
        assert row["model_flops_per_second"] * row["step_seconds"] == pytest.approx(wanted, rel=1e-9)


def test_peaks_are_those_of_the_vendor() -> None:
    peaks = {
        "NVIDIA H100 80GB HBM3": 989.4e12, "NVIDIA A100-SXM4-40GB": 312e12, "AMD Instinct MI300X": 1307.4e12,
        "Tesla V100-SXM2-32GB": 15.7e12, "NVIDIA H200 NVL": None, "NVIDIA H100 PCIe": None, "NVIDIA A10": None,
    }  # fmt: skip
    for name, peak in peaks.items():
        machine = machine_of_device(name)
        assert (None if machine is None else peak_flops_of(machine["flops"], "bfloat16", tf32=False)) == peak, name
    precision: Any = SimpleNamespace(name="bf16", product_dtype=lambda _: torch.bfloat16, parameter_dtype=torch.float32)
    assert peak_flops(torch.device("cpu"), precision) is None


def test_a_row_has_the_memory_of_the_process(job: JobFile) -> None:
    hpctrain.run(job.tables)
    for row in rows():
        now, peak = row["host_bytes"]["rank_max"], row["memory_bytes"]["rank_max"]
        assert 50 * 2**20 < now <= 1.01 * peak and row["host_bytes"]["rank_mean"] == now
        assert not {"allocated_bytes", "mfu", "loss_scale", "rank_loss", "straggler"} & row.keys()


def test_a_program_asks_for_its_memory(job: JobFile) -> None:
    before = hpctrain.memory()
    kept = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = hpctrain.memory("cpu")
    assert before.keys() == after.keys() == {"memory_bytes", "host_bytes"}
    assert 60 * 2**20 < after["host_bytes"] - before["host_bytes"] < 80 * 2**20 and len(kept)


def test_background_saves_tell_how_long_they_wrote(job: JobFile) -> None:
    job.set(job={"steps": 6}, checkpoint={"every_steps": 2, "asynchronous": True})
    result = hpctrain.run(job.tables)
    drained = [row["drain_seconds"] for row in rows() if "drain_seconds" in row]
    assert 1 <= len(drained) <= 3 and all(one > 0 for one in drained)
    assert sum(row["seconds"]["checkpoint"] for row in rows()) > 0
    own = {"goodput", "drain_seconds"}
    assert result["metrics"] == {key: value for key, value in rows()[-1].items() if key not in own}


def own(ranks: int, **seconds: Callable[[int], float]) -> list[list[float]]:
    """Each rank's own seconds by part."""
    return [[seconds.get(part, lambda _: 0.0)(rank) for part in PARTS] for rank in range(ranks)]


def see(judge: Stragglers, own: list[list[float]], seconds: float) -> Straggler | None:
    """The straggler of steps that spend all of the ranks' own time."""
    return judge.see(own, own, seconds)


@pytest.mark.parametrize(
    ("part", "cause"),
    [("data", "data"), ("backward", "compute"), ("optimizer", "compute"), ("other", "host"), ("checkpoint", "save")],
)
def test_a_slow_rank_is_found_by_its_own_excess(part: str, cause: str) -> None:
    judge = Stragglers(["a", "a", "b", "b"])
    slow = own(
        4,
        forward=lambda _: 1.0,
        **{part: lambda rank: 0.1 + (0.5 if rank == 2 else 0.01 * rank) + (part == "backward")},
    )
    found = [see(judge, slow, 1.5) for _ in range(30)]
    first = next(place for place, one in enumerate(found) if one is not None)
    assert first == (1 if cause == "save" else 4), "one step tells nothing, nor does the first save"
    one = found[-1]
    assert one is not None and (one.rank, one.node, one.cause) == (2, "b", cause)
    assert one.excess_seconds == pytest.approx(0.49 if part != "forward" else 0.5, abs=0.02)


def test_noise_names_nobody() -> None:
    short = Stragglers(["a"] * 4)  # for as long as another program uses a core
    steps = [see(short, own(4, forward=lambda rank: 0.05 + 0.03 * (rank == 1)), 0.08) for _ in range(60)]
    assert not any(steps) and see(short, own(4, forward=lambda rank: 0.05 + 0.03 * (rank == 1)), 1.0) is not None
    judge = Stragglers(["a"] * 4)
    for step in range(40):  # another one is slow in each step
        assert see(judge, own(4, forward=lambda rank, now=step: 1.0 + 0.4 * (now % 4 == rank)), 1.4) is None


@pytest.mark.parametrize(
    ("loading", "waiting", "slow"),
    [
        (
            (0.16, 0.16, 0.159),
            (0.15, 0.0, 0.0),
            False,
        ),  # one waits for its samples, the others for it, while they load ahead
        ((0.9, 0.1, 0.1), (0.0, 0.0, 0.0), False),  # loaded ahead in time
        ((0.5, 0.1, 0.1), (0.4, 0.0, 0.0), True),
    ],
)
def test_a_rank_loads_slowly_only_if_its_own_loading_takes_longer(
    loading: tuple[float, ...], waiting: tuple[float, ...], slow: bool
) -> None:
    judge = Stragglers(["a"] * 3)
    work, waits = (own(3, data=lambda rank, of=of: of[rank]) for of in (loading, waiting))
    found = [judge.see(work, waits, 0.5) for _ in range(60)]
    assert any(found) is slow and (not slow or (found[-1].rank, found[-1].excess_seconds) == (0, pytest.approx(0.4)))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_micro_batch_tells_how_long_its_samples_took(workers: int) -> None:
    samples, plan = Batches(Slow()), [Planned([0, 1, 2], 0) for _ in range(3)]
    pool, begin = Pool(samples, workers, start_method="fork"), time.perf_counter()
    try:
        seconds = [one.seconds * max(1, workers) for one in pool.load(iter(plan))]
        assert len(seconds) == 3 and min(seconds) > 0.05 and max(seconds) < time.perf_counter() - begin
    finally:
        pool.close()


@pytest.mark.thorough
def test_goodput_is_the_time_of_steps_that_count_since_the_first_start(job: JobFile) -> None:
    job.set(checkpoint={"every_steps": 3}, evaluation={"every_steps": 2})
    hpctrain.run({**job.tables, "job": {**job.tables["job"], "steps": 5}})
    shutil.rmtree("out/checkpoints/step-00000005")
    Path("out/checkpoints/latest").unlink(missing_ok=True)
    Path("out/checkpoints/latest").symlink_to("step-00000003")
    lost = rows()[3:]
    hpctrain.run({**job.tables, "job": {**job.tables["job"], "steps": 8}})
    first, again, told = map(json.loads, Path("out/starts.jsonl").read_text().splitlines())
    assert "command" in first and "command" in again
    assert (told["back_to_step"], told["lost_steps"]) == (3, 2)
    assert told["lost_seconds"] == pytest.approx(sum(sum(row["seconds"].values()) for row in lost))
    begin, good = datetime.fromisoformat(first["time"]).timestamp(), 0.0
    for row in rows():
        good += sum(row["seconds"][part] for part in ("forward", "backward", "communication", "optimizer", "other"))
        assert row["goodput"] == pytest.approx(good / (row["time"] - begin), rel=0.05), row["step"]
    assert 0 < rows()[-1]["goodput"] < 1
