"""examples/images as its first line says to run it: it learns, and ranks, an interruption and evaluations change no figure."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launching import INTERRUPT, Finished, hpctrain, run, started, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "images"
SHORT = [
    "job.epochs=", "job.steps=75", "schedule.warmup_steps=5", "evaluation.every_epochs=0", "evaluation.every_steps=25",
    "checkpoint.every_epochs=0", "checkpoint.every_steps=25", "precision.mode=fp64", "dataset.workers=0",
]  # fmt: skip
"""In float64 sums in another order change no prediction."""
CLOCKED = {
    "time", "step_seconds", "samples_per_second", "samples_per_second_per_rank", "seconds", "straggler", "model_flops_per_second",
    "memory_bytes", "host_bytes", "exposed_seconds", "hidden_seconds", "bytes_per_second", "goodput", "rank_loss",
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its images, trained on one rank and on two; workers change no augmentation, either."""
    directory = tmp_path_factory.mktemp("images") / "images"
    shutil.copytree(EXAMPLE, directory, ignore=shutil.ignore_patterns("runs", "__pycache__", "*.npz"))
    assert run([sys.executable, "draw.py"], directory).code == 0
    train(directory, 1, "dataset.workers=1")
    train(directory, 2)
    return directory


def words(ranks: int, output: str, *more: str) -> list[str]:
    pairs = [*SHORT, f"job.output_dir={output}", *more]
    return hpctrain("run", "images.toml", "-n", str(ranks), *(word for pair in pairs for word in ("--set", pair)))


def train(directory: Path, ranks: int, *more: str) -> Finished:
    done = run(words(ranks, f"on-{ranks}", *more), directory)
    assert done.code == 0 and not done.err, done
    return done


def figures(output: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without clocks."""
    lines = (output / "metrics.jsonl").read_text().splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # another may be half written
    return [{name: value for name, value in row.items() if name not in CLOCKED} for row in rows]


def evaluations(output: Path) -> list[dict[str, Any]]:
    return [row for row in figures(output) if "evaluation_loss" in row]


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_accuracy_is_the_same_to_the_last_digit_on_any_number_of_ranks(directory: Path, ranks: int) -> None:
    if ranks > 2:
        train(directory, ranks)
    expected, found = evaluations(directory / "on-1"), evaluations(directory / f"on-{ranks}")
    assert [row["evaluation_accuracy"] for row in found] == [row["evaluation_accuracy"] for row in expected]
    losses = [row["evaluation_loss"] for row in found]
    assert losses == pytest.approx([row["evaluation_loss"] for row in expected], rel=1e-12)
    assert [row["step"] for row in found] == [25, 50, 75] and found[-1]["evaluation_accuracy"] > 0.2, found


@pytest.mark.thorough
def test_an_interrupted_run_continues_to_the_same_figures(directory: Path) -> None:
    output = directory / "interrupted"
    with started(words(1, "interrupted"), directory) as command:
        wait_until(lambda: (output / "metrics.jsonl").exists() and len(figures(output)) > 25, 60, "it trains")
        command.process.send_signal(INTERRUPT)
        stopped = command.finish(60)
    assert stopped.code == 75 and len(figures(output)) < 78, stopped
    continued = run(words(1, "interrupted"), directory)
    assert continued.code == 0, continued
    assert figures(output) == figures(directory / "on-1")


@pytest.mark.thorough
def test_evaluate_and_predict_give_the_figures_of_the_run(directory: Path) -> None:
    """The run was on two ranks; the labels come from the file."""
    row = evaluations(directory / "on-2")[-1]
    common = ["images.toml", "--checkpoint", "on-2/checkpoints/latest", "--weights-of", "ema"]
    common += ["--set", "dataset.workers=0", "--set", "precision.mode=fp64"]
    evaluated = run(hpctrain("evaluate", *common, "--json"), directory)
    assert evaluated.code == 0, evaluated
    found = json.loads(evaluated.out)
    assert found["accuracy"] == row["evaluation_accuracy"] and found["loss"] == pytest.approx(
        row["evaluation_loss"], rel=1e-12
    )
    predicted = run(hpctrain("predict", *common, "--out", "logits.npy"), directory)
    assert predicted.code == 0, predicted
    labels = np.load(directory / "images.npz")["validation_labels"]
    assert np.mean(np.load(directory / "logits.npy").argmax(1) == labels) == row["evaluation_accuracy"]
