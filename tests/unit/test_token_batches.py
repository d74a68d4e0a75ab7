"""Batches by token budget: what is in them, how ranks share them, and how samples are padded."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import TINY
from plain import samples_of

import hpctrain
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.checking.check import check
from hpctrain.data.order import SampleOrder
from hpctrain.data.plan import Planned
from hpctrain.data.shapes import Padding
from hpctrain.data.tokens import TokenPlan, padded, share_out, whole_batches
from hpctrain.job.problems import JobError
from hpctrain.job.raw import RawJob

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60).map(np.array)


def steps_of(planned: Iterator[Planned]) -> list[list[Planned]]:
    """Micro batches by step."""
    steps: list[list[Planned]] = [[]]
    for one in planned:
        steps[-1].append(one)
        if one.after is not None:
            steps.append([])
    assert steps.pop() == []
    return steps


def naive(order: SampleOrder, lengths: Any, tokens: int, steps: int) -> list[list[int]]:
    """Samples of each step, one after the other until the next would not fit."""
    made: list[list[int]] = [[]]
    left = tokens
    for index in order.at(0, steps * tokens + 1).tolist():
        if lengths[index] > left:
            if len(made) == steps:
                break
            made.append([])
            left = tokens
        made[-1].append(index)
        left -= int(lengths[index])
    return made


@pytest.mark.thorough
@settings(max_examples=40)
@given(LENGTHS, st.integers(0, 100), st.integers(0, 30), st.integers(1, 5), st.integers(1, 4))
def test_every_rank_takes_its_part_of_the_same_batches(
    lengths: Any, more: int, room: int, ranks: int, multiple: int
) -> None:
    tokens, capacity = 40 + more, padded(40, multiple) + room
    order = SampleOrder(len(lengths), 3, "f")
    plans = [TokenPlan(lengths, tokens, capacity, multiple, rank, ranks) for rank in range(ranks)]
    by_rank = [steps_of(plan.training(order.at, 0, 6)) for plan in plans]
    seen = 0
    for step, expected in enumerate(naive(order, lengths, tokens, 6)):
        mine = [rank[step] for rank in by_rank]
        assert len({len(micro_batches) for micro_batches in mine}) == 1, "as many forwards on all ranks"
        taken = [i for micro_batches in mine for one in micro_batches if one.counts for i in one.indices]
        assert sorted(taken) == sorted(expected)
        for one in (one for micro_batches in mine for one in micro_batches):
            assert len(one.indices) * max(padded(int(lengths[i]), multiple) for i in one.indices) <= capacity
        places = [one.place for micro_batches in mine for one in micro_batches if one.counts]
        assert len(set(places)) == len(places), "random numbers are drawn from the place"
        seen += len(expected)
        assert {micro_batches[-1].after for micro_batches in mine} == {seen}
        # a resume from here goes on with the same micro batches
        assert steps_of(plans[-1].training(order.at, seen, 5 - step)) == by_rank[-1][step + 1 :]


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 8), st.integers(40, 200), st.integers(1, 4))
def test_the_most_loaded_rank_has_at_most_the_longest_sample_above_the_mean(
    lengths: Any, ranks: int, room: int, multiple: int
) -> None:
    shares = share_out(lengths, ranks, padded(40, multiple) + room, multiple)
    places = [place for rank in shares for micro in rank for place in micro]
    assert sorted(places) == list(range(len(lengths)))
    loads = [sum(int(lengths[place]) for micro in rank for place in micro) for rank in shares]
    assert max(loads) <= sum(loads) / ranks + int(lengths.max()) * (1 - 1 / ranks) + 1e-9


@pytest.mark.thorough
@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 3), st.integers(0, 60))
def test_an_epoch_has_each_sample_once_and_its_steps_are_counted(lengths: Any, epochs: int, more: int) -> None:
    tokens, samples = 40 + more, epochs * len(lengths)
    order = SampleOrder(len(lengths), 3, "f")
    steps = whole_batches(order.at, lengths, tokens, samples)
    made = naive(order, lengths, tokens, steps + 1)
    taken = [index for batch in made for index in batch][:samples]
    assert sum(len(batch) for batch in made[:steps]) <= samples < sum(map(len, made)) + 1
    for epoch in range(len(taken) // len(lengths)):
        assert sorted(taken[epoch * len(lengths) : (epoch + 1) * len(lengths)]) == list(range(len(lengths)))


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 4), st.sampled_from([None, 1, 2]))
def test_evaluation_takes_each_sample_once(lengths: Any, ranks: int, batches: int | None) -> None:
    plans = [list(TokenPlan(lengths, 60, 45, 1, r, ranks).evaluation(len(lengths), batches)) for r in range(ranks)]
    assert len({len(plan) for plan in plans}) == 1
    taken = sorted(i for plan in plans for one in plan if one.counts for i in one.indices)
    assert taken == list(range(len(taken)))
    assert taken[-1] == len(lengths) - 1 if batches is None else lengths[: len(taken)].sum() <= 60 * batches


def test_padding_fills_behind_the_end() -> None:
    padding = Padding({"ids": 0, "labels": -100}, multiple=4)
    samples = [
        {"ids": torch.tensor(r), "labels": torch.tensor(r), "w": torch.tensor(2.0)} for r in ([1], [3, 4, 5, 6, 7])
    ]
    batch = padding(samples)
    assert batch["ids"].tolist() == [[1] + [0] * 7, [3, 4, 5, 6, 7, 0, 0, 0]] and batch["w"].tolist() == [2, 2]
    assert batch["labels"].tolist() == [[1] + [-100] * 7, [3, 4, 5, 6, 7, -100, -100, -100]]
    assert padding.blank(batch)["labels"].tolist() == [[-100] * 4]
    with pytest.raises(TrainingError, match="found ids"):
        padding([{"ids": torch.tensor([1])}])
    with pytest.raises(TrainingError, match="found tuple"):
        padding([(torch.tensor([1]), 1)])


def tables(**changes: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(TINY))
    made["job"]["seed"] = 3
    made |= {"batch": {"tokens": 60, "micro_tokens": 20}, "model": {**made["model"], "vocab_size": 256}}
    return made | changes


def test_documents_of_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines as samples of their own; no token of a line that is too long is lost, and nothing is made of blank ones."""
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_bytes(b"abcdefghijklmnopq\n\n  \nxy")
    Path("b.txt").write_bytes(b"z\n")
    dataset = {"name": "text", "files": ["*.txt"], "documents": "line", "validation_fraction": 0}
    samples = samples_of(tables(dataset=dataset))
    texts = [
        (bytes(s["input_ids"].tolist()), bytes(s["labels"].tolist())) for s in (samples[i] for i in range(len(samples)))
    ]
    assert texts == [(b"abcdefgh", b"bcdefghi"), (b"ijklmnop", b"jklmnopq"), (b"q", b"\n"), (b"x", b"y"), (b"z", b"\n")]
    lengths = samples.lengths()
    assert lengths is not None and lengths.tolist() == [8, 8, 1, 1, 1]
    files = samples_of(tables(dataset={**dataset, "documents": "file", "validation_fraction": 0.5}), "validation")
    assert len(files) == 1 and bytes(files[0]["labels"].tolist()) == b"\n"
    assert files.fingerprint() != samples.fingerprint()
    with pytest.raises(UsageError, match=r"use .batch. tokens and micro_tokens"):
        hpctrain.run(tables(dataset=dataset, batch={"global_size": 2, "micro_size": 1}))


def test_what_cannot_take_batches_by_tokens() -> None:
    """A pipeline, whose stages receive one shape, and a model that cannot be padded; both are told."""
    foreign = {"name": "torch.nn:Linear", "in_features": 1, "out_features": 1, "loss": "torch.nn.functional:mse_loss"}
    with pytest.raises(JobError, match="pipeline needs micro batches of one shape") as error:
        check(RawJob(tables(parallelism={"pipeline": 2}, model=foreign), {}, "j"), None)
    assert "does not say how to pad" in str(error.value)


def test_a_run_by_epochs_with_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two epochs are as many whole global batches as they hold."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join("abcdefg"[: i % 7 + 1] + "\n" for i in range(40)))
    dataset = {"name": "text", "files": ["text.txt"], "documents": "line", "validation_fraction": 0}
    made = tables(job={"name": "a", "epochs": 2, "output_dir": "a"}, dataset={**dataset, "workers": 1})
    assert hpctrain.run(made)["step"] == 2 * sum(i % 7 + 1 for i in range(40)) // 60
    rows = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    assert all(40 < row["tokens"] <= 60 for row in rows) and len({row["tokens"] for row in rows}) > 1
