"""Jobs on one GPU have the losses of a plain torch loop on it, under every stage and with all GPU-only features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from launching import hpctrain, run
from on_gpu import (
    DEVICE,
    OTHER_DEVICE,
    SAME_DEVICE,
    SGD,
    compare,
    job,
    losses,
    needs_gpu,
    plain,
    rows_of,
    trained,
)  # fmt: skip
from plain import gpt_loss, samples_of, stacked, train_gpt

pytestmark = [needs_gpu, pytest.mark.timeout(180)]

ADAMW: dict[str, Any] = {}
STAGES = [
    {"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 1, "offload_optimizer": True},
    {"stage": 2, "offload_optimizer": True}, {"stage": 3, "offload_optimizer": True},
    {"stage": 3, "offload_parameters": True},
]  # fmt: skip


def test_nccl_with_one_rank_gives_the_cpu_s_losses(tmp_path: Path) -> None:
    tables = job(tmp_path)
    _, steps = train_gpt(tables, torch.float32)
    compare(trained(tables), steps, OTHER_DEVICE)


@pytest.mark.parametrize("optimizer", [ADAMW, SGD], ids=["adamw", "clipped sgd"])
@pytest.mark.parametrize("sharding", STAGES, ids=str)
def test_stages(tmp_path: Path, sharding: dict[str, Any], optimizer: dict[str, Any]) -> None:
    tables = job(tmp_path, sharding=sharding, optimizer=optimizer)
    _, steps = plain(tables)
    if optimizer is SGD:
        assert sum(norm > SGD["clip_norm"] for _, norm in steps) >= 3, "the clip must bind"
    compare(trained(tables), steps, SAME_DEVICE)


@pytest.mark.parametrize(
    "checkpointing",
    [{"mode": "full"}, {"mode": "full", "offload": True}, {"mode": "selective"}],
    ids=str,
)
@pytest.mark.parametrize("stage", [0, 3])
def test_activation_checkpointing(tmp_path: Path, stage: int, checkpointing: dict[str, Any]) -> None:
    tables = job(tmp_path, sharding={"stage": stage}, activation_checkpointing=checkpointing)
    compare(trained(tables), plain(tables)[1], SAME_DEVICE)


@pytest.mark.parametrize(
    ("stage", "mode"), [(0, "none"), (2, "none"), (3, "none"), (0, "full"), (0, "selective")], ids=str
)
def test_compiled_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, mode: str) -> None:
    asked, compile_ = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda made, **how: asked.append(made) or compile_(made, **how))
    tables = job(
        tmp_path, sharding={"stage": stage}, activation_checkpointing={"mode": mode}, compile={"enabled": True}
    )
    compare(trained(tables), plain(tables)[1], SAME_DEVICE)
    assert len(asked) == tables["model"]["layers"] + 1, "and the loss"


def test_auto_takes_the_gpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tables = job(tmp_path)
    del tables["precision"], tables["communicator"]
    rows = trained(tables)
    printed = capfd.readouterr().out
    assert f"on {DEVICE.type}" in printed and "accelerator communicator" in printed
    assert "bf16 (auto)" in printed or "fp32 (auto)" in printed
    assert losses(rows) == pytest.approx([loss for loss, _ in plain(tables)[1]], rel=5e-3)


def test_evaluation(tmp_path: Path) -> None:
    tables = job(tmp_path, dataset={"validation_samples": 48}, evaluation={"every_steps": 8})
    module, steps = plain(tables)
    compare(trained(tables), steps, SAME_DEVICE)
    samples = samples_of(tables, "validation")
    batch = stacked([samples[i] for i in range(48)])
    with torch.no_grad():
        expected = gpt_loss(module, *(tensor.to(DEVICE) for tensor in batch)).item()
    (row,) = (row for row in rows_of(tables) if "evaluation_loss" in row)
    assert row["evaluation_tokens"] == 48 * 32 and row["evaluation_loss"] == pytest.approx(expected, rel=SAME_DEVICE)


@pytest.mark.parametrize("words", [[], ["-n", "1"]], ids=["alone", "started"])
def test_as_typed(tmp_path: Path, words: list[str]) -> None:
    tables = job(Path("out"))
    (tmp_path / "job.toml").write_text(tomli_w.dumps(tables))
    done = run(hpctrain("run", "job.toml", *words), tmp_path, timeout=120)
    assert done.code == 0 and f"on {DEVICE.type}" in done.out, done
    more = run(hpctrain("run", "job.toml", *words, "--set", "job.steps=10"), tmp_path, timeout=120)
    assert more.code == 0 and "resuming     from step 8" in more.out, more
