"""A look at the evaluation before the first step: it finds what would fail there, and the training does not notice it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hpctrain
from hpctrain.base.errors import HpctrainError, TrainingError, UsageError
from hpctrain.training.evaluation import is_compiled

ROWS, CLASSES = 40, 3


class Noticing(nn.Module):
    """Its steps depend on everything that a forward can leave behind."""

    def __init__(self, noisy: bool = False) -> None:
        super().__init__()
        self.noisy = noisy
        self.embedding = nn.Embedding(99, 6, max_norm=0.5)
        self.norm, self.dropout, self.head = nn.BatchNorm1d(6, momentum=0.5), nn.Dropout(0.3), nn.Linear(6, CLASSES)
        self.shift = nn.Parameter(torch.zeros(6))
        self.begun, self.forwards = False, 0
        self.register_buffer("largest", torch.zeros(()))
        self.seen: Tensor | None = None

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids).mean(1)
        if not self.begun:  # takes its first values from its first batch
            self.shift.data.copy_(-x.detach().mean(0))
            self.begun = True
        self.forwards += 1
        self.largest = torch.maximum(self.largest, x.detach().abs().max())
        self.seen = x.detach() if self.seen is None else self.seen
        noise = torch.rand(()).item() + (random.random() + np.random.rand() if self.noisy else 0.0)
        x = self.norm(x + self.shift) * (1 + 0.1 * self.forwards) + self.largest + self.seen.mean()
        return SimpleNamespace(logits=self.head(self.dropout(x)) * (1 + 0.1 * noise), features=x)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        return torch.randint(99, (4,), generator=generator), (index // 8) % CLASSES


def loss(outputs: Any, target: Tensor) -> Tensor:
    return cross_entropy(outputs.logits, target)


def dict_of_logits() -> nn.Module:
    class Pair(Noticing):
        def forward(self, ids: Tensor) -> Any:
            return {"features": ids, "logits": super().forward(ids).logits}

    return Pair()


def loss_of_dict(outputs: Any, target: Tensor) -> Tensor:
    return cross_entropy(outputs["logits"], target)


class OneClassIsNone:
    """As an area under a curve, it has no value where all are of one class."""

    def __init__(self) -> None:
        self.classes: set[int] = set()

    def update(self, outputs: Any, target: Tensor) -> None:
        self.classes |= set(target.tolist())

    def compute(self) -> float:
        if len(self.classes) == 1:
            raise ValueError("only one class is present")
        return float(len(self.classes))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def run(name: str, **changes: Any) -> dict[str, Any]:
    random.seed(1)
    np.random.seed(1)
    tables: dict[str, Any] = {
        "job": {"name": name, "steps": 4, "output_dir": name},
        "model": {"name": Noticing, "loss": loss},
        "dataset": {"name": {"train": Rows(0), "validation": Rows(1000)}},
        "optimizer": {"name": "adamw", "lr": 0.05, "weight_decay": 0.3},
        "batch": {"global_size": 16, "micro_size": 8},
        "evaluation": {"every_steps": 100},
        "metric": [{"name": "accuracy"}],
    }
    return hpctrain.run({**tables, **changes})


def steps(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.cases(nightly=["1"])
@pytest.mark.parametrize("workers", [0, 1])
def test_no_step_is_changed_by_it(workers: int) -> None:
    data = {"name": {"train": Rows(0), "validation": Rows(1000)}, "workers": workers}
    # data that is loaded on a thread of the rank saves and restores the generators of Python and NumPy whenever it likes
    model = {"name": Noticing, "loss": loss, "noisy": bool(workers)}
    with_it = run("with", dataset=data, model=model)
    without = run("without", dataset=data, model=model, evaluation={}, metric=[])
    assert with_it["losses"] == without["losses"], "to the last bit"
    assert 0 <= with_it["evaluation"]["accuracy"] <= 1 and without["evaluation"] is None
    assert [row["grad_norm"] for row in steps("with")[:4]] == [row["grad_norm"] for row in steps("without")]


def test_the_logits_among_a_model_s_outputs() -> None:
    assert 0 <= run("dict", model={"name": dict_of_logits, "loss": loss_of_dict})["evaluation"]["accuracy"] <= 1
    with pytest.raises(UsageError, match=r"returned tuple, in which the prediction is unknown; expected a tensor"):
        run(
            "pair",
            model={
                "name": lambda: nn.LSTM(4, CLASSES, batch_first=True),
                "loss": lambda outputs, target: cross_entropy(outputs[0][:, -1], target),
            },
            dataset={
                "name": {one: [(torch.rand(5, 4), i % CLASSES) for i in range(ROWS)] for one in ("train", "validation")}
            },
        )


def fails(outputs: Any, target: Tensor) -> float:
    raise ValueError("no such thing")


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"metric": [{"name": fails}]}, TrainingError, "raised ValueError: no such thing"),
        ({"metric": [{"name": "accuracy"}, {"name": "top-k", "k": 1}, {"name": "top-k", "k": 1}]}, UsageError, "two values"),
        (
            {"checkpoint": {"every_steps": 2, "keep_best": {"metric": "acuracy"}}, "evaluation": {"every_steps": 2}},
            UsageError, r"keep_best: evaluations measure loss, accuracy, and not 'acuracy'",
        ),
        (
            {"hook": [{"name": "early-stopping", "metric": "acuracy", "mode": "max"}]},
            UsageError, r"early-stopping: evaluations measure loss, accuracy, and not 'acuracy'",
        ),
    ],
)  # fmt: skip
def test_what_would_fail_in_an_evaluation_fails_before_the_first_step(
    changes: dict[str, Any], error: type[HpctrainError], says: str
) -> None:
    with pytest.raises(error, match=says):
        run("fails", **changes)
    assert not steps("fails"), "no step was trained"


def test_a_metric_that_needs_more_samples_is_no_reason_to_stop(capsys: pytest.CaptureFixture[str]) -> None:
    """The first micro batch of these rows has one class; all of them have three."""
    metric = [{"name": "accuracy"}, {"name": OneClassIsNone}]
    assert run("more", metric=metric)["evaluation"]["oneclassisnone"] == CLASSES
    said = capsys.readouterr().out
    assert "has no value after one micro batch" in said and "only one class is present" in said


def test_a_labelless_first_micro_batch_is_no_reason_to_stop() -> None:
    class Later(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            row, label = super().__getitem__(index)
            return row, -100 if index < 8 else label

    data = {"name": {"train": Rows(0), "validation": Later(1000)}}

    def masked(outputs: Any, target: Tensor) -> Tensor:
        return cross_entropy(outputs.logits, target, reduction="none")

    assert run("later", dataset=data, model={"name": Noticing, "loss": masked})["step"] == 4


def test_what_is_compiled_is_left_alone() -> None:
    module = Noticing()
    assert not is_compiled(module) and is_compiled(torch.compile(module))  # type: ignore[arg-type]
    module.head.forward = torch.compile(module.head.forward)  # type: ignore[method-assign]
    assert is_compiled(module)
