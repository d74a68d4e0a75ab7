"""The measurements of a step on several ranks: operations whatever the layout, the losses of ranks, traffic by axis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hpctrain_plugins.model.gpt import GPT
from sources import keys_of_metrics_page
from torch.profiler import ProfilerActivity, profile
from training import job, nightly, own_device, session_of, train_here

from hpctrain.ranks.signals import StopRequest
from hpctrain.training.loop import train, train_step
from hpctrain.training.step import Steps

pytestmark = pytest.mark.usefixtures("world")

LAYOUTS = [
    {},
    {"sharding": {"stage": 3}},
    {"parallelism": {"tensor": 2}},
    nightly({"parallelism": {"pipeline": 2}}),
    nightly({"parallelism": {"context": 2}, "model": {"max_seq_length": 8}}),
    nightly({"activation_checkpointing": {"mode": "full"}}),
]


@pytest.mark.cases(default=["{}-formula"], thorough=["{'sharding': {'stage': 3}}-formula"], rest="nightly")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("told", [True, False], ids=["formula", "counted"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_operations_are_the_model_s_whatever_the_layout(
    root: Path, layout: dict[str, Any], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dist.get_world_size() % 2 and "parallelism" in layout:
        pytest.skip("needs an even number of ranks")
    if not told:
        monkeypatch.setattr(GPT, "flops", lambda *_: None)
    tables = job(job={"output_dir": str(root), "steps": 4}, **layout)
    found = [row["model_flops_per_second"] * row["step_seconds"] for row in train_here(tables).rows]
    size = tables["model"]
    hidden, layers, seq = size["hidden_size"], size["layers"], size["max_seq_length"]
    matrices = 12 * layers * hidden**2 + hidden * size["vocab_size"]
    attended = 0.75 if "context" in str(layout) and not told else 1.0  # the later half never looks at what is masked
    wanted = tables["batch"]["global_size"] * seq * (6 * matrices + attended * 12 * layers * hidden * seq)
    assert found == pytest.approx([wanted] * 4, rel=1e-9)


@pytest.mark.ranks(2)
def test_the_losses_of_ranks_are_around_the_batch_s(root: Path) -> None:
    rows = train_here(job(job={"output_dir": str(root)})).rows
    assert all(row["rank_loss"]["rank_min"] < row["loss"] < row["rank_loss"]["rank_max"] for row in rows)
    if dist.get_world_size() == 2:  # with as many tokens each
        assert [sum(row["rank_loss"].values()) / 2 for row in rows] == pytest.approx([row["loss"] for row in rows])


@pytest.mark.nightly
@pytest.mark.ranks(2)
def test_traffic_by_axis_agrees_with_a_trace(root: Path) -> None:
    """torch's profiler sees the operations of tensor parallelism from outside."""
    if dist.get_backend() != "mpi4py" or dist.get_world_size() % 2:
        pytest.skip("needs hpctrain.mpi, since others tell no bytes, and an even number of ranks")
    if own_device().type != "cpu":
        pytest.skip("a wait for a late result copies it to the device, which is no communication")
    size = {"hidden_size": 64, "layers": 4, "attention_heads": 4, "vocab_size": 64, "max_seq_length": 64}
    tables = job(
        job={"output_dir": str(root), "steps": 8}, model=size, batch={"global_size": 24, "micro_size": 12},
        parallelism={"tensor": 2},
    )  # fmt: skip
    with session_of(tables) as session:
        steps = Steps(session, StopRequest())
        steps.begin()
        try:
            for _ in range(2):
                train_step(steps)
            session.meters.traffic.take()
            with profile(activities=[ProfilerActivity.CPU]) as trace:
                for _ in range(4):
                    train_step(steps)
        finally:
            steps.close()
    name = "_c10d_functional::wait_tensor"
    seen = sum(event.cpu_time_total for event in trace.events() if event.name == name) / 1e6
    rows = (
        [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()] if dist.get_rank() == 0 else []
    )
    told = sum(row["exposed_seconds"]["tp.all_reduce"] for row in rows[2:])
    # the profiler counts what the rank waits for a core, too
    assert not rows or 0.6 * seen < told < 1.02 * seen, (told, seen)
    axes = {key.partition(".")[0] for row in rows for key in row["bytes_per_second"]}
    assert not rows or axes == {"tp"} | ({"dp_replicate"} if dist.get_world_size() > 2 else set())


def test_exposed_and_hidden_seconds_are_those_of_the_backend(root: Path) -> None:
    import hpctrain.mpi

    before = hpctrain.mpi.statistics()
    with session_of(job(job={"output_dir": str(root), "steps": 4})) as session:
        session.meters.traffic.take()
        begin = hpctrain.mpi.statistics()
        train(session, StopRequest())
    after = hpctrain.mpi.statistics()
    assert before.total.blocked_seconds <= begin.total.blocked_seconds
    if dist.get_rank() == 0:
        rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
        exposed = sum(sum(row.get("exposed_seconds", {}).values()) for row in rows)
        # the start, and the save at the end, are in no row
        assert (
            0.1 * (after.total.blocked_seconds - begin.total.blocked_seconds)
            < exposed
            <= after.total.blocked_seconds - begin.total.blocked_seconds
        )


@pytest.mark.ranks(2)
def test_the_page_of_metrics_has_each_key_of_several_ranks(root: Path) -> None:
    train_here(job(job={"output_dir": str(root), "steps": 3}))
    if dist.get_rank() == 0:
        rows = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
        keys = {key for row in rows for key in row}
        assert "rank_loss" in keys and not keys - keys_of_metrics_page(), keys
