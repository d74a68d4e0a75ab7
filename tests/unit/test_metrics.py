"""What evaluations measure, in one process, held against sklearn-like counts by hand and against torchmetrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from jobs import TINY
from plain import module_of, samples_of
from sources import keys_of_metrics_page
from torch.nn.functional import cross_entropy

import hpctrain
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.checking.check import check
from hpctrain.job.problems import JobError
from hpctrain.job.raw import RawJob

OWN = """
import torch
from torchmetrics.classification import MulticlassAccuracy

CALLS = []

def exact(outputs, target):
    CALLS.append((tuple(outputs.shape), tuple(target.shape)))
    return (outputs.argmax(-1) == target).double().mean(-1)

def mean(outputs, target, factor=1.0):
    return factor * (outputs.argmax(-1) == target).double().mean()

def pair(outputs, target):
    return (outputs.argmax(-1) == target).sum(), target.numel()

def wrong(outputs, target):
    return outputs

def fails(outputs, target):
    raise ValueError("no such class")

class Micro(MulticlassAccuracy):
    def __init__(self, classes):
        super().__init__(classes, average="micro")

    def update(self, outputs, target):
        super().update(outputs.flatten(0, -2), target.flatten())

class Nothing:
    pass

def words(outputs, target):
    return "good", len(target)

class Text:
    def __init__(self, found):
        self.found = found

    def update(self, outputs, target):
        pass

    def compute(self):
        return self.found
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "own_metrics.py").write_text(OWN)
    monkeypatch.delitem(__import__("sys").modules, "own_metrics", raising=False)


def tables(*metrics: dict[str, Any], **changes: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(TINY))
    made["job"]["seed"] = 3
    made["dataset"] |= {"samples": 70, "validation_samples": 30}
    made |= {"evaluation": {"every_steps": 2}, "metric": list(metrics)}
    for name, table in changes.items():
        made.setdefault(name, {}).update(table)
    return made


def evaluations(output: str = "out") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "evaluation_loss" in row]


def test_the_shipped_ones_and_ones_own_count_what_a_loop_counts(capsys: pytest.CaptureFixture[str]) -> None:
    own = [{"name": f"own_metrics:{name}"} for name in ("exact", "pair")]
    with_options = [{"name": "own_metrics:mean", "factor": 2.0}, {"name": "own_metrics:Micro", "classes": 64}]
    job = tables(
        {"name": "accuracy"}, {"name": "top-k", "k": 3}, {"name": "perplexity"}, *own, *with_options, job={"steps": 4}
    )
    hpctrain.run(job)
    last = evaluations()[-1]
    module = module_of(job, torch.float32)
    module.load_state_dict(weights())
    samples = samples_of(job, "validation")
    batch = {key: torch.stack([sample[key] for sample in samples]) for key in ("input_ids", "labels")}
    with torch.no_grad():
        logits = module(batch["input_ids"]).double()
    labels = batch["labels"]
    right = (logits.argmax(-1) == labels).double()
    assert right.mean() > 0, "else everything is equal to nothing"
    for name in ("accuracy", "exact", "pair", "micro"):
        assert last[f"evaluation_{name}"] == pytest.approx(right.mean().item(), abs=1e-7)
    assert last["evaluation_mean"] == pytest.approx(2 * right.mean().item())
    ranks = (logits > logits.gather(-1, labels[..., None])).sum(-1)
    assert last["evaluation_top_3"] == pytest.approx((ranks < 3).double().mean().item())
    loss = cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert last["evaluation_perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-5)
    assert last["evaluation_loss"] == pytest.approx(loss, rel=1e-5)
    assert f"accuracy {last['evaluation_accuracy']:.4f}" in capsys.readouterr().out
    assert last["step"] == 4 and last["epoch"] == pytest.approx(48 / 70) and last["time"] > 1.7e9


def weights() -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    with h5py.File(Path("out/checkpoints/step-00000004/shard-00000.h5")) as file:
        return {name.removeprefix("/"): torch.from_numpy(file["model"][name][...]) for name in file["model"]}


def test_what_is_not_counted() -> None:
    """Padded places, whose label is -100."""
    changed = {"dataset": {"min_length": 2}, "batch": {"tokens": 60, "micro_tokens": 20}}
    job = tables({"name": "accuracy"}, {"name": "perplexity"})
    job["dataset"] |= changed["dataset"]
    job["batch"] = changed["batch"]
    hpctrain.run(job)
    for row in evaluations():
        assert row["evaluation_perplexity"] == pytest.approx(
            torch.tensor(row["evaluation_loss"]).exp().item(), rel=1e-5
        )


@pytest.mark.thorough
def test_the_best_by_a_metric_stay() -> None:
    job = tables(
        {"name": "accuracy"}, job={"steps": 8}, evaluation={"every_steps": 1}, optimizer={"lr": 0.3},
        checkpoint={"every_steps": 1, "keep_best": {"count": 2, "metric": "accuracy", "mode": "max"}},
    )  # fmt: skip
    hpctrain.run({**job, "job": {**job["job"], "steps": 5}})
    hpctrain.run(job)  # those before the resume count, too
    rows = evaluations()
    best = sorted(rows, key=lambda row: (-row["evaluation_accuracy"], -row["step"]))[:2]
    kept = {path.name for path in Path("out/checkpoints").glob("step-*")}
    assert kept == {f"step-{row['step']:08d}" for row in best} | {"step-00000008"}
    assert Path("out/checkpoints/best").read_text() == f"step-{best[0]['step']:08d}\n"
    assert {row["step"] for row in best} != {7, 8}, "the newest two would have stayed anyway"


def test_evaluations_by_epochs() -> None:
    hpctrain.run(tables(job={"steps": 13}, evaluation={"every_steps": 0, "every_epochs": 1}))
    # 70 samples: the first step that completes a pass is 6 (72), then 12 (144); the last one is evaluated, too
    assert [row["step"] for row in evaluations()] == [6, 12, 13]


@pytest.mark.parametrize(
    ("metric", "error", "says"),
    [
        ({"name": "own_metrics:wrong"}, TrainingError, r"own_metrics:wrong.*returned .*expected a number"),
        ({"name": "own_metrics:fails"}, TrainingError, r"(?s)raised ValueError: no such class.*own_metrics.py"),
        ({"name": "own_metrics:words"}, TrainingError, r"own_metrics:words' measured 'good', expected a number"),
        ({"name": "own_metrics:Text", "found": "fine"}, TrainingError, r"own_metrics:Text' measured 'fine', expected a number"),
        ({"name": "own_metrics:Text", "found": {"a": "b"}}, TrainingError, r"own_metrics:Text': a measured 'b', expected a num"),
        ({"name": "own_metrics:Nothing"}, UsageError, r"expected a function of outputs and target, or a class of torchmetrics"),
    ],
)  # fmt: skip
def test_a_metric_that_cannot_be_used(metric: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        hpctrain.run(tables(metric))


def test_what_the_check_says_of_metrics() -> None:
    found = problems(tables({"name": "acuracy"}, {"name": "own_metrics:mean", "factr": 1}, {"name": "top-k", "k": 0}))
    assert "did you mean 'accuracy'?" in found and "takes no argument 'factr'" in found and "k" in found
    job = tables({"name": "accuracy"}, evaluation={"every_steps": 0})
    assert "[[metric]] name = 'accuracy': it needs evaluations; expected [evaluation] every_steps" in problems(job)


def test_two_that_measure_the_same() -> None:
    twice = tables({"name": "accuracy"}, {"name": "top-k", "k": 1}, {"name": "top-k", "k": 1})
    with pytest.raises(UsageError, match="found two values called 'top_1'"):
        hpctrain.run(twice)


def problems(job: dict[str, Any]) -> str:
    with pytest.raises(JobError) as error:
        check(RawJob(job, {}, "job"), 1)
    return str(error.value)


def test_keep_best_by_what_nobody_measures_deletes_nothing() -> None:
    checkpoint = {"every_steps": 1, "keep_best": {"metric": "acuracy", "mode": "max"}}
    with pytest.raises(UsageError, match=r"keep_best: evaluations measure loss, accuracy, and not 'acuracy'"):
        hpctrain.run(tables({"name": "accuracy"}, checkpoint=checkpoint))


@pytest.mark.thorough
def test_a_resume_does_not_evaluate_out_of_turn() -> None:
    job = tables(job={"steps": 10}, evaluation={"every_steps": 0, "every_epochs": 1}, checkpoint={"every_steps": 7})
    hpctrain.run({**job, "job": {**job["job"], "steps": 7}, "evaluation": {}})
    hpctrain.run(job)  # step 6 completed the epoch, 7 did not
    assert [row["step"] for row in evaluations()] == [10]


def test_the_page_of_metrics_has_each_key() -> None:
    hpctrain.run(tables({"name": "accuracy"}))
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    found = {key for row in rows for key in row}
    assert {"step", "seconds", "evaluation_accuracy"} <= found
    assert not {key for key in found - keys_of_metrics_page() if not key.startswith("evaluation_")}
