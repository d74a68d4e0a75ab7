"""Metrics under every kind of layout are those of one process; also torchmetrics' own sums over ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import both_splits, built, sequence_of_halves, two_losses
from training import job, nightly, train_here

from hpctrain.data.order import SampleOrder
from hpctrain.registry.user_code.dataset import UserDataset

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2)]

NAMED: list[dict[str, Any]] = [
    {}, {"sharding": {"stage": 3}}, {"parallelism": {"pipeline": 2}}, {"parallelism": {"pipeline": 2}, "sharding": {"stage": 1}},
]  # fmt: skip


@pytest.mark.cases(default=["{}"], nightly=["{'parallelism': {'pipeline': 2}}"], rest="thorough")
@pytest.mark.parametrize("layout", NAMED, ids=str)
@pytest.mark.shown_on(2, 4)
def test_losses_by_name(root, layout: dict[str, Any]) -> None:
    """Each is reported, in training and in evaluations; together they are the loss."""
    tables: dict[str, Any] = {
        "job": {"name": "named", "steps": 3, "seed": 3, "output_dir": str(root)},
        "model": {"name": "modules:sequence_of_halves", "loss": "modules:two_losses"},
        "dataset": {"name": "modules:both_splits"}, "optimizer": {"name": "torch.optim:SGD", "lr": 0.3},
        "batch": {"global_size": 24, "micro_size": 3}, "precision": {"mode": "fp64"}, "evaluation": {"every_steps": 3}, **layout,
    }  # fmt: skip
    found = train_here(tables)
    torch.set_default_dtype(torch.float64)
    try:
        module = built(tables, sequence_of_halves)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.3)
        opened = UserDataset("modules:both_splits", {}).open("train", None)  # type: ignore[arg-type]
        assert opened is not None
        order = SampleOrder(len(opened), 3, opened.fingerprint())
        for step, row in enumerate(found.rows):
            ids, labels = map(
                torch.stack, zip(*[opened[int(i)] for i in order.at(step * 24, (step + 1) * 24)], strict=True)
            )
            losses = {name: value.mean() for name, value in two_losses(module(ids), labels).items()}
            optimizer.zero_grad()
            torch.stack(list(losses.values())).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            assert {"class": row["loss_class"], "size": row["loss_size"]} == pytest.approx(
                {name: value.item() for name, value in losses.items()}, rel=1e-9
            )
            assert row["loss"] == pytest.approx(row["loss_class"] + row["loss_size"], rel=1e-12)
        ids, labels = map(torch.stack, zip(*both_splits("validation"), strict=True))
        expected = {name: value.mean().item() for name, value in two_losses(module(ids), labels).items()}
    finally:
        torch.set_default_dtype(torch.float32)
    (evaluated,) = found.evaluations
    assert {"class": evaluated["evaluation_loss_class"], "size": evaluated["evaluation_loss_size"]} == pytest.approx(
        expected, rel=1e-9
    )


@pytest.mark.parametrize("layout", NAMED, ids=str)
@pytest.mark.shown_on(2, 4)
def test_a_value_beside_the_loss_is_not_trained(root, layout: dict[str, Any]) -> None:
    tables: dict[str, Any] = {
        "job": {"name": "beside", "steps": 3, "seed": 3},
        "model": {"name": "modules:sequence_of_halves", "loss": "modules:loss_and_size"},
        "dataset": {"name": "modules:both_splits"}, "optimizer": {"name": "torch.optim:SGD", "lr": 0.3},
        "batch": {"global_size": 24, "micro_size": 3}, "precision": {"mode": "fp64"}, "evaluation": {"every_steps": 3}, **layout,
    }  # fmt: skip
    alone = {**tables["model"], "loss": "torch.nn.functional:cross_entropy"}
    found, plain = (
        train_here({**tables, "job": {**tables["job"], "output_dir": str(root / name)}, "model": model})
        for name, model in (("beside", tables["model"]), ("alone", alone))
    )
    assert [row["loss"] for row in found.rows] == [row["loss"] for row in plain.rows]
    assert all(row["size"] > 0 and "loss_size" not in row for row in found.rows)
    assert found.rows[0]["size"] != found.rows[1]["size"]
    (evaluated,), (expected,) = found.evaluations, plain.evaluations
    assert evaluated["evaluation_loss"] == expected["evaluation_loss"] and evaluated["evaluation_size"] > 0


METRICS = [
    {"name": "accuracy"}, {"name": "top-k", "k": 3}, {"name": "perplexity"}, {"name": "flat_accuracy:Micro", "classes": 61},
]  # fmt: skip
KNOWN: dict[str, list[dict[str, float]]] = {}


@pytest.mark.cases(nightly=["{}", "{'parallelism': {'tensor': 2}}"], rest="thorough")
@pytest.mark.parametrize(
    "layout",
    [
        {}, {"sharding": {"stage": 3}}, {"parallelism": {"tensor": 2}}, {"parallelism": {"context": 2}},
        {"parallelism": {"pipeline": 2}, "batch": {"micro_size": 3}},
        nightly({"parallelism": {"tensor": 2, "context": 2}}),
    ],
    ids=str,
)  # fmt: skip
def test_metrics_are_those_of_one_process(root, layout: dict[str, Any]) -> None:
    needed = 1
    for size in layout.get("parallelism", {}).values():
        needed *= size
    if dist.get_world_size() % needed:
        pytest.skip(f"needs a multiple of {needed} ranks")
    tables = job(
        job={"output_dir": str(root), "steps": 4}, dataset={"validation_samples": 10}, evaluation={"every_steps": 2},
        precision={"mode": "fp64"}, **layout,
    )  # fmt: skip
    found = train_here({**tables, "metric": METRICS}).evaluations
    assert len(found) == 2
    for row in found:
        # 10 samples x 8 tokens, whatever their ranks: fractions of 80
        for name in ("accuracy", "top_3", "micro"):
            share = row[f"evaluation_{name}"] * 80
            assert share == pytest.approx(round(share), abs=1e-4), (name, row)
        assert row["evaluation_micro"] == pytest.approx(row["evaluation_accuracy"], abs=1e-6)
        assert row["evaluation_accuracy"] <= row["evaluation_top_3"]
    mine = [{key: value for key, value in row.items() if key.startswith("evaluation")} for row in found]
    expected = KNOWN.setdefault(
        "layout", mine
    )  # the first one is plain data parallelism, which tests/unit holds against a loop
    for row, other in zip(mine, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-6)


@pytest.mark.cases(
    thorough=["{'parallelism': {'pipeline': 2}, 'batch': {'micro_size': 3}, 'sharding': {'stage': 1}}"], rest="nightly"
)
@pytest.mark.parametrize(
    "layout",
    [
        *map(nightly, ({"sharding": {"stage": stage}} for stage in range(3))),
        {"sharding": {"stage": 3}},
        nightly({"sharding": {"stage": 3, "reshard_after_forward": False}, "precision": {"mode": "bf16"}}),
        {"parallelism": {"tensor": 2}, "sharding": {"stage": 2}},
        nightly({"parallelism": {"context": 2}, "batch": {"tokens": 80, "micro_tokens": 16}, "dataset": {"min_length": 2}}),
        {"parallelism": {"pipeline": 2}, "batch": {"micro_size": 3}, "sharding": {"stage": 1}},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.shown_on(2, 4)
def test_the_look_at_the_evaluation_changes_no_step(root, layout: dict[str, Any]) -> None:
    """To the last bit, and every rank knows what is measured."""
    tables = job(job={"output_dir": str(root / "without"), "steps": 4}, **layout)
    if "batch" in layout and "tokens" in layout["batch"]:
        tables["batch"] = layout["batch"]
    evaluated = {**tables, "job": {**tables["job"], "output_dir": str(root / "with")}, "metric": METRICS}
    evaluated |= {"evaluation": {"every_steps": 100}, "dataset": {**tables["dataset"], "validation_samples": 10}}
    without, found = train_here(tables).rows, train_here(evaluated)
    assert found.measured == ["loss", "accuracy", "top_3", "perplexity", "micro"] and len(found.evaluations) == 1
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in found.rows] == [row[key] for row in without]
