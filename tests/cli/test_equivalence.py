"""The loss curve does not depend on the number of ranks: `-n 1` to `-n 4` and halved micro batches, 20 steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import JobFile
from launching import hpctrain, run
from plain import train_gpt

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"name": "adamw", "lr": 0.003, "weight_decay": 0.1},
    # a gradient that is scaled wrongly hides behind AdamW and shows with SGD; the clip binds at the beginning
    "sgd": {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.5},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_number_of_ranks_gives_the_same_curve(job: JobFile, optimizer: str) -> None:
    job.tables["optimizer"] = OPTIMIZERS[optimizer]
    job.tables["dataset"] = {"name": "stdlib-text", "max_bytes": 100_000}
    job.set(job={"steps": 20}, batch={"global_size": 24, "micro_size": 2}, precision={"mode": "fp32"})
    job.set(model={"vocab_size": 256})
    layouts = {"1": ["-n", "1"], "2": ["-n", "2"], "3": ["-n", "3"], "4": ["-n", "4"]}
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


@pytest.mark.parametrize(
    ("changes", "bound"),
    [
        ({"precision": {"mode": "fp64"}}, 1e-10),
        ({"precision": {"mode": "fp32"}, "activation_checkpointing": {"mode": "full"}}, 2e-6),
        ({"precision": {"mode": "bf16"}}, 2e-3),
        ({"precision": {"mode": "fp16"}}, 5e-4),
        ({"precision": {"mode": "fp32"}, "compression": {"name": "bf16"}}, 2e-3),
        ({"sharding": {"reduce_bucket_size": 1000, "overlap_communication": False}}, 2e-6),
    ],
)
def test_two_ranks_and_one_in_every_mode(job: JobFile, changes: dict[str, dict[str, Any]], bound: float) -> None:
    """16-bit modes are held against the fp32 curve within their rounding, the others against themselves."""
    job.tables["optimizer"] = OPTIMIZERS["sgd"]
    job.set(job={"steps": 10}, **changes)
    two = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert two.code == 0, two
    reference = ["--set", "job.output_dir='one'"]
    if bound > 1e-5:
        reference += ["--set", "precision.mode='fp32'", "--set", "compression.name='none'"]
    one = run(hpctrain("run", "job.toml", *reference), job.directory)
    assert one.code == 0, one
    assert job.losses() == pytest.approx(job.losses("one"), rel=bound)
    if bound > 1e-5:
        assert job.losses() != job.losses("one"), "16 bits cannot give the same numbers"


def test_a_job_goes_on_in_another_stage_on_another_number_of_ranks(job: JobFile) -> None:
    job.tables["optimizer"] = OPTIMIZERS["sgd"]
    job.set(job={"steps": 9, "seed": 3}, precision={"mode": "fp32"})
    _, steps = train_gpt(job.tables, torch.float32)
    for until, ranks, stage in ((3, "2", 2), (6, "1", 0), (9, "3", 3)):
        words = ["-n", ranks, "--set", f"job.steps={until}", "--set", f"sharding.stage={stage}"]
        done = run(hpctrain("run", "job.toml", *words), job.directory)
        assert done.code == 0, done
    assert job.losses() == pytest.approx([loss for loss, _ in steps], rel=2e-6)
    assert [row["grad_norm"] for row in job.rows()] == pytest.approx([norm for _, norm in steps], rel=1e-5)
