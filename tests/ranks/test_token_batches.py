"""Batches by token budget on 1 to 4 ranks: the curve is that of one process without padding and micro batches."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from equivalence_table import BOUNDS
from plain import Step, module_of, samples_of, train_plainly
from test_layouts import layout_words
from test_stages import compare
from torch import Tensor
from torch.nn.functional import cross_entropy
from training import SGD, job, train_here

from hpctrain.data.order import SampleOrder

pytestmark = pytest.mark.usefixtures("world")

TOKENS = 90
DATASET = {"name": "synthetic", "samples": 40, "validation_samples": 31, "min_length": 1}
LAYOUTS: list[tuple[dict[str, Any], int]] = [
    *(({}, stage) for stage in (0, 1, 2, 3)),
    ({"tensor": 2}, 0),
    ({"tensor": {"size": 2, "sequence_parallel": True}}, 3),
    ({"context": 2}, 2),
    ({"context": {"size": 2, "method": "ulysses"}}, 3),
]
PACKED = [LAYOUTS[0], LAYOUTS[3], *LAYOUTS[5:]]


def tables_of(root, parallelism: dict[str, Any], stage: int, packing: bool = False, **more: Any) -> dict[str, Any]:
    made = job(
        job={"output_dir": str(root), "steps": 8}, optimizer=SGD, dataset=DATASET, parallelism=parallelism,
        sharding={"stage": stage},
    )  # fmt: skip
    return {**made, "batch": {"tokens": TOKENS, "micro_tokens": 16, "packing": packing}, **more}


def losses_of(tables: dict[str, Any], module: Callable[[Tensor], Tensor]) -> Iterator[Callable[[], Tensor]]:
    """Takes samples in order until the next would not fit, and forwards each alone."""
    samples = samples_of(tables)
    order, position = SampleOrder(len(samples), tables["job"]["seed"], samples.fingerprint()), 0
    for _ in range(tables["job"]["steps"]):
        batch: list[dict[str, Tensor]] = []
        while True:
            sample = samples[int(order.at(position, position + 1)[0])]
            if sum(len(s["labels"]) for s in [*batch, sample]) > tables["batch"]["tokens"]:
                break
            batch.append(sample)
            position += 1
        yield functools.partial(mean_loss, module, batch)


def mean_loss(module: Callable[[Tensor], Tensor], batch: list[dict[str, Tensor]]) -> Tensor:
    parts = [cross_entropy(module(s["input_ids"][None])[0], s["labels"], reduction="sum") for s in batch]
    return torch.stack(parts).sum() / sum(len(s["labels"]) for s in batch)


@functools.lru_cache
def _plain(text: str) -> list[Step]:
    tables = json.loads(text)
    module = module_of(tables, torch.float32)
    options = {k: v for k, v in SGD.items() if k not in ("name", "clip_norm")}
    optimizer = torch.optim.SGD(module.parameters(), **options)
    return train_plainly(module, optimizer, losses_of(tables, module), SGD["clip_norm"])


def reference() -> list[Step]:
    return _plain(json.dumps(tables_of(".", {}, 0)))


def somewhere(parallelism: dict[str, Any], *values: Any) -> Any:
    """The world sizes to test: a few, or all of them with cut sequences."""
    sizes = () if "context" in parallelism else (2,) if parallelism else (3,)
    return pytest.param(parallelism, *values, marks=[pytest.mark.shown_on(*sizes)] if sizes else [])


def skip_unless_even(parallelism: dict[str, Any]) -> None:
    if parallelism and dist.get_world_size() % 2:
        pytest.skip("needs an even number of ranks")


@pytest.mark.cases(default=["{}-1"], thorough=["{}-3", "{'context': 2}-2"], rest="nightly")
@pytest.mark.parametrize(("parallelism", "stage"), [somewhere(*layout) for layout in LAYOUTS], ids=str)
def test_the_curve_of_one_process(root, record, parallelism: dict[str, Any], stage: int) -> None:
    skip_unless_even(parallelism)
    rows = train_here(tables_of(root, parallelism, stage)).rows
    found = compare(rows, reference(), *BOUNDS["fp32"])
    words = layout_words(parallelism) or "data parallel"
    record("fp32", f"stage {stage}, tokens, {words}", found, "sgd", True, "none")
    assert len({row["tokens"] for row in rows}) > 1, "budgets that are never quite filled"


@pytest.mark.cases(thorough=["{}-0", "{'context': 2}-2"], rest="nightly")
@pytest.mark.parametrize(("parallelism", "stage"), [somewhere(*layout) for layout in PACKED], ids=str)
def test_packed_rows(root, record, parallelism: dict[str, Any], stage: int) -> None:
    """The curve of samples that are forwarded one by one; each in a row with others here, and cut by context parallelism."""
    skip_unless_even(parallelism)
    tables = tables_of(root / "packed", parallelism, stage, packing=True, evaluation={"every_steps": 4})
    trained = train_here(tables)
    found = compare(trained.rows, reference(), *BOUNDS["fp32"])
    words = layout_words(parallelism) or "data parallel"
    record("fp32", f"stage {stage}, packed, {words}", found, "sgd", True, "none")
    padded = train_here(tables_of(root / "padded", parallelism, stage, evaluation={"every_steps": 4})).evaluations
    for mine, other in zip(trained.evaluations, padded, strict=True):
        assert mine["evaluation_loss"] == pytest.approx(other["evaluation_loss"], rel=1e-5)
        assert mine["evaluation_tokens"] == other["evaluation_tokens"]


@pytest.mark.cases(nightly=["{'tensor': 2}"], rest="thorough")
@pytest.mark.parametrize("parallelism", [somewhere({}), somewhere({"tensor": 2})], ids=str)
def test_a_resume_on_another_number_of_data_parallel_ranks(root, parallelism: dict[str, Any]) -> None:
    """The second half of the steps runs under another layout, starting in the middle of an epoch."""
    skip_unless_even(parallelism)
    first = tables_of(root, {}, 2)
    first["job"]["steps"] = 3
    rows = train_here(first).rows
    rows += train_here(tables_of(root, parallelism, 0)).rows
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7, 8]
    compare(rows, reference(), *BOUNDS["fp32"])


@pytest.mark.cases(thorough=["{}-3"])
@pytest.mark.parametrize(("parallelism", "stage"), [somewhere(*LAYOUTS[3]), LAYOUTS[6]], ids=str)
def test_evaluation_counts_each_token_once(root, parallelism: dict[str, Any], stage: int) -> None:
    skip_unless_even(parallelism)
    tables = tables_of(root, parallelism, stage, evaluation={"every_steps": 8})
    (row,) = train_here(tables).evaluations
    lengths = samples_of(tables, "validation").lengths()
    assert lengths is not None and row["evaluation_tokens"] == lengths.sum()


@pytest.mark.shown_on(3)
def test_fewer_samples_than_ranks(root) -> None:
    """Some ranks have only padding, and no rank hangs."""
    tables = tables_of(root, {}, 3, batch={"tokens": 8, "micro_tokens": 8})
    assert all(0 < row["tokens"] <= 8 for row in train_here(tables).rows)
