"""hpctrain.run with objects of the program in place of names."""

from __future__ import annotations

import functools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from jobs import TINY
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import hpctrain
from hpctrain.base.errors import HpctrainError, UsageError


class Squares(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """x and whether its square is above a half."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.tensor([(index % 17) / 17])
        return x, (x[0] ** 2 > 0.5).long()


def make_job(**tables: Any) -> dict[str, Any]:
    return {
        "job": {"name": "objects", "steps": 6, "seed": 2},
        "model": {"name": lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)), "loss": cross_entropy},
        "dataset": {"name": Squares(64)},
        "optimizer": {"name": torch.optim.AdamW, "lr": 0.05},
        "batch": {"global_size": 16, "micro_size": 8},
        "precision": {"mode": "fp32"},
        **tables,
    }


@pytest.fixture(autouse=True)
def _in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_functions_classes_and_instances() -> None:
    result = hpctrain.run(make_job())
    assert result["step"] == len(result["losses"]) == 6 and result["losses"][-1] == result["loss"]
    assert result["losses"][-1] < result["losses"][0] and result["evaluation"] is None and result["exit_code"] == 0
    resolved = Path("runs/objects/job.resolved.toml").read_text()
    assert 'name = "torch.optim.adamw:AdamW"' in resolved and 'loss = "torch.nn.functional:cross_entropy"' in resolved
    assert 'name = "python:lambda"' in resolved and 'name = "python:Squares"' in resolved


def test_the_module_of_a_run_is_loaded_with_its_objects() -> None:
    job = make_job()
    result = hpctrain.run(job)
    with pytest.raises(HpctrainError, match=r"python:lambda is an object of the Python program .* give it again"):
        hpctrain.load(result["checkpoint"])
    module = hpctrain.load(result["checkpoint"], job)
    x, target = (torch.stack(column) for column in zip(*(Squares(64)[i] for i in range(64)), strict=True))
    assert cross_entropy(module(x), target).item() < result["losses"][0]


def test_an_importable_model_is_loaded_without_the_other_objects() -> None:
    """The model's own values, whatever data, loss and optimizer the program had."""
    job = make_job(
        model={
            "name": "torch.nn:Linear",
            "in_features": 1,
            "out_features": 2,
            "loss": lambda outputs, y: cross_entropy(outputs, y),
        },
        optimizer={"name": lambda groups, lr: torch.optim.SGD(groups, lr), "lr": 0.1},
        evaluation={"every_steps": 3},
        metric=[{"name": share_of_ones}],
        checkpoint={"every_steps": 3, "keep_best": {"count": 1, "metric": "share_of_ones", "mode": "max"}},
    )
    job["dataset"] = {"name": {"train": Squares(64), "validation": Squares(17)}}
    path = hpctrain.run(job)["checkpoint"]
    found, expected = (hpctrain.load(path, *given).state_dict() for given in ((), (job,)))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


class Callable(Squares):
    def __call__(self) -> None:
        raise AssertionError("not a function")


def test_data_that_can_be_called_is_data() -> None:
    assert hpctrain.run(make_job(dataset={"name": Callable(64)}))["step"] == 6


def test_a_module_is_copied_and_keeps_its_values() -> None:
    module = nn.Linear(1, 2)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    job = make_job(model={"name": module, "loss": cross_entropy}, optimizer={"name": "sgd", "lr": 1e-30})
    result = hpctrain.run(job)
    after = hpctrain.load(result["checkpoint"], job).state_dict()
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_splits_metrics_schedules_and_partial_functions() -> None:
    job = make_job(
        dataset={"name": {"train": Squares(64), "validation": Squares(17)}},
        optimizer={"name": functools.partial(torch.optim.SGD, momentum=0.5), "lr": 0.1},
        schedule={"name": lambda step, steps: 1 - step / steps},
        metric=[{"name": torchmetrics.classification.MulticlassAccuracy(2, average="micro")}, {"name": share_of_ones}],
        evaluation={"every_steps": 3},
    )
    result = hpctrain.run(job)
    metrics = result["evaluation"]
    module = hpctrain.load(result["checkpoint"], job)
    x, target = (torch.stack(column) for column in zip(*(Squares(17)[i] for i in range(17)), strict=True))
    with torch.no_grad():
        outputs = module(x)
    assert metrics["loss"] == pytest.approx(cross_entropy(outputs, target).item(), rel=1e-5)
    assert metrics["multiclassaccuracy"] == pytest.approx((outputs.argmax(1) == target).float().mean().item())
    assert metrics["share_of_ones"] == pytest.approx(target.float().mean().item())


def share_of_ones(outputs: Tensor, target: Tensor) -> Tensor:
    return target.float().mean()


def test_sources_of_a_mixture() -> None:
    """Data sets of the program, in the shares of their sizes: 16 of 24 samples, and all of them in two epochs."""
    order: list[int] = []

    class Seen(Squares):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            order.append(self.size + 1000 * index)
            return super().__getitem__(index)

    sources = {"one": {"name": Seen(64)}, "other": {"name": {"train": Seen(32)}}}
    job = make_job(dataset={"name": "mixture", "sources": sources})
    job["job"] = {"name": "mixed", "epochs": 2}
    assert len(hpctrain.run(job)["losses"]) == 12
    drawn = Counter(one % 1000 for one in order[-192 + 24 :])
    assert drawn[64] / drawn[32] == pytest.approx(2, rel=0.1) and len(set(order)) == 96


def test_numbers_of_an_array() -> None:
    """As a sweep over np.linspace() or np.arange() gives them."""
    sizes = {"global_size": np.int64(16), "micro_size": np.int32(8)}
    given = hpctrain.run(make_job(batch=sizes, optimizer={"name": "sgd", "lr": np.float32(0.5)}))
    plain = make_job(optimizer={"name": "sgd", "lr": 0.5}, job={"name": "plain", "steps": 6, "seed": 2})
    assert given["losses"] == hpctrain.run(plain)["losses"]


def test_a_finished_job_gives_its_last_loss() -> None:
    first = hpctrain.run(TINY)
    again = hpctrain.run(TINY)
    assert again["loss"] == first["loss"] and math.isfinite(again["loss"])
    assert (again["step"], again["losses"], again["checkpoint"]) == (first["step"], [], first["checkpoint"])


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        ({"optimizer": {"name": object(), "lr": 0.1}}, r"\[optimizer\] name: found object, expected a function or a class"),
        ({"dataset": {"name": {"training": Squares(64)}}}, "found a dict with the splits 'training', expected 'train'"),
        ({"dataset": {"name": "tokens", "path": object()}}, r"\[dataset\] path: found object, expected a value as in a job file"),
        ({"job": {"name": object(), "steps": 1}}, r"\[job\] name: found object"),
        ({"model": {"name": nn.Linear, "in_features": 1, "out_features": 1, "loss": mse_loss, "bias": nn.Linear}}, "partial"),
    ],
)  # fmt: skip
def test_objects_where_none_are_taken(tables: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        hpctrain.run(make_job(**tables))
