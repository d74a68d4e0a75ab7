"""The loss curve does not depend on the number of ranks: `-n 1` to `-n 4` and halved micro batches, 20 steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs import JobFile
from launching import hpctrain, run
from plain import train_gpt

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 0.003, "weight_decay": 0.1},
    # AdamW hides a wrongly scaled gradient, SGD shows it; the clip binds at the beginning
    "sgd": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.5},
}


@pytest.mark.cases(nightly=["sgd"], rest="thorough")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_number_of_ranks_gives_the_same_curve(job: JobFile, optimizer: str) -> None:
    job.tables["optimizer"] = OPTIMIZERS[optimizer]
    job.tables["dataset"] = {"name": "stdlib-text", "max_bytes": 100_000}
    job.set(job={"steps": 20}, batch={"global_size": 24, "micro_size": 2}, precision={"mode": "fp32"})
    job.set(model={"vocab_size": 256})
    layouts = {ranks: ["-n", ranks] for ranks in (("1", "2", "4") if optimizer == "adamw" else ("1", "2", "3", "4"))}
    if optimizer == "sgd":  # SGD shows more
        layouts["2-halved"] = ["-n", "2", "--set", "batch.micro_size=1"]
    for name, words in layouts.items():
        done = run(hpctrain("run", "job.toml", *words, "--set", f"job.output_dir='{name}'"), job.directory)
        assert done.code == 0, done
    reference = job.rows("1")
    assert len(reference) == 20 and reference[-1]["loss"] < reference[0]["loss"]
    if optimizer == "sgd":
        assert sum(row["grad_norm"] > 0.5 for row in reference) > 3, "the clip must bind"
    for name in layouts:
        rows = job.rows(name)
        assert [r["loss"] for r in rows] == pytest.approx([r["loss"] for r in reference], rel=2e-6), name
        assert [r["grad_norm"] for r in rows] == pytest.approx([r["grad_norm"] for r in reference], rel=1e-5), name
        assert [r["tokens"] for r in rows] == [r["tokens"] for r in reference]


@pytest.mark.thorough
def test_two_ranks_in_bf16_are_near_one_in_fp32(job: JobFile) -> None:
    """As typed; tests/ranks/test_stages.py compares every mode with a single process."""
    job.tables["optimizer"] = OPTIMIZERS["sgd"]
    job.set(job={"steps": 10}, precision={"mode": "bf16"}, compression={"name": "bf16"})
    two = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert two.code == 0, two
    one = run(
        hpctrain("run", "job.toml", "--set", "job.output_dir='one'", "--set", "precision.mode='fp32'"), job.directory
    )
    assert one.code == 0, one
    assert job.losses() == pytest.approx(job.losses("one"), rel=2e-3)
    assert job.losses() != job.losses("one"), "16 bits cannot give the same numbers"


@pytest.mark.nightly
def test_a_job_goes_on_in_another_layout_on_another_number_of_ranks(job: JobFile) -> None:
    job.tables["optimizer"] = OPTIMIZERS["sgd"]
    job.set(job={"steps": 8, "seed": 3}, precision={"mode": "fp32"})
    _, steps = train_gpt(job.tables, torch.float32)
    layouts = [("2", 2, {}), ("4", 1, {"pipeline": 2, "tensor": 2}), ("3", 3, {}), ("1", 0, {})]
    for number, (ranks, stage, parallelism) in enumerate(layouts, 1):
        job.set(sharding={"stage": stage}).tables["parallelism"] = parallelism
        job.write()
        done = run(hpctrain("run", "job.toml", "-n", ranks, "--set", f"job.steps={2 * number}"), job.directory)
        assert done.code == 0, done
    assert job.losses() == pytest.approx([loss for loss, _ in steps], rel=2e-6)
    assert [row["grad_norm"] for row in job.rows()] == pytest.approx([norm for _, norm in steps], rel=1e-5)
