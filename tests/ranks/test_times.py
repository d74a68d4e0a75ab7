"""The times of a step in its row: they add up, and a slow rank is named with what is slow about it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from training import Rows, job, nightly, own_device, session_of

from hpctrain.ranks.signals import StopRequest
from hpctrain.registry.hookspecs import hookimpl
from hpctrain.training.loop import train
from hpctrain.training.meters import stragglers
from hpctrain.training.meters.clock import PARTS
from hpctrain.training.session import Session

pytestmark = pytest.mark.usefixtures("world")
NAP, LONG_NAP = 0.15, 0.6
"""Seconds: of a step, and of a save, for which rank 0 takes a while itself."""


class Observer(Rows):
    """Keeps the rows, and when each step ended."""

    def __init__(self, begin: Callable[[Any], None] = lambda _: None) -> None:
        super().__init__(None)
        self.ends: list[float] = []
        self._begin = begin

    @hookimpl
    def hpctrain_job_start(self, model: Any) -> None:
        self._begin(model)

    @hookimpl
    def hpctrain_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        self.ends.append(time.perf_counter())
        self.rows.append(dict(metrics))


def trained(tables: dict[str, Any], observer: Observer, change: Callable[[Session], None] = lambda _: None) -> Observer:
    with session_of(tables, observer) as session:
        change(session)
        train(session, StopRequest())
    return observer


def nap_on_the_last(*_: Any, seconds: float = NAP) -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(seconds)


def slow_data(session: Session) -> None:
    """Each micro batch of the last rank takes longer than all that is loaded ahead hides."""
    training = session.feed._training
    of_class = type(training)
    fetch = of_class.__getitem__

    class Slow(of_class):  # type: ignore[misc, valid-type]
        def __getitem__(self, index: Any) -> Any:
            nap_on_the_last()
            return fetch(self, index)

    training.__class__ = Slow


def slow_compute(model: Any) -> None:
    model.module.register_forward_pre_hook(nap_on_the_last)


def slow_save(session: Session) -> None:
    write = session.store._writer.write

    def slowly(*arguments: Any) -> None:
        nap_on_the_last(seconds=LONG_NAP)
        write(*arguments)

    session.store._writer.write = slowly  # type: ignore[method-assign]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout", [{}, nightly({"sharding": {"stage": 3}}), nightly({"sharding": {"stage": 1}})], ids=str
)
def test_the_times_add_up(root, layout: dict[str, Any]) -> None:
    tables = job(
        job={"output_dir": str(root), "steps": 8},
        evaluation={"every_steps": 3},
        checkpoint={"every_steps": 4},
        dataset={"validation_samples": 10},
        **layout,
    )
    found = trained(tables, Observer(slow_compute))
    sums = [sum(row["seconds"][part] for part in PARTS) for row in found.rows]
    # the figures are exchanged before the row is made, by as much in each step
    assert sum(sums[2:]) == pytest.approx(found.ends[-1] - found.ends[1], rel=0.02)
    behind = int(own_device().type != "cpu")  # a row of an accelerator has the times of the step before
    assert found.rows[3 + behind]["seconds"]["evaluation"] > 0 and found.rows[4 + behind]["seconds"]["checkpoint"] > 0
    if dist.get_world_size() > 1:  # the others wait
        share = NAP * (dist.get_world_size() - 1) / dist.get_world_size()
        assert all(row["seconds"]["communication"] > 0.5 * share for row in found.rows[behind:])


@pytest.mark.cases(thorough=["save"], rest="nightly")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("cause", ["data", "compute", "save"])
def test_a_slow_rank_is_named(root, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stragglers, "_SPAN", 4 * NAP)
    tables = job(job={"output_dir": str(root), "steps": 14}, checkpoint={"every_steps": 4})
    changes = {"data": slow_data, "save": slow_save}
    observer = Observer(slow_compute) if cause == "compute" else Observer()
    found = trained(tables, observer, changes.get(cause, lambda _: None))
    told = [row["straggler"] for row in found.rows if "straggler" in row]
    assert told, found.rows
    worst = max(told, key=lambda one: one["excess_seconds"])  # a busy machine may slow another one
    assert (worst["rank"], worst["cause"]) == (dist.get_world_size() - 1, cause), told
    assert 0.3 * NAP < worst["excess_seconds"] < 30 * NAP


BURNER = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@pytest.mark.nightly
@pytest.mark.ranks(2)
def test_a_rank_on_a_core_that_others_use_is_named(root) -> None:
    """Each rank has a core of its own; on the last one's, three programs compute, too."""
    cores, rank, last = sorted(os.sched_getaffinity(0)), dist.get_rank(), dist.get_world_size() - 1
    if len(cores) <= last:
        pytest.skip("needs a core for each rank")
    burners = []
    os.sched_setaffinity(0, {cores[rank]})
    try:
        if rank == last:
            burners = [subprocess.Popen([sys.executable, "-c", BURNER, str(cores[rank])]) for _ in range(3)]
        model = {"hidden_size": 64, "layers": 4, "attention_heads": 4, "max_seq_length": 64}
        found = trained(job(job={"output_dir": str(root), "steps": 60}, model=model), Observer())
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
        os.sched_setaffinity(0, cores)
    told = [(row["straggler"]["rank"], row["straggler"]["cause"]) for row in found.rows if "straggler" in row]
    assert len(told) >= 10 and set(told) == {(last, "compute")}, told


@pytest.mark.nightly
@pytest.mark.ranks(2)
@pytest.mark.parametrize("run", range(10))
def test_no_rank_is_named_where_none_is_slow(root, run: int) -> None:
    found = trained(job(job={"output_dir": str(root), "steps": 150, "seed": run}), Observer())
    assert not [row["straggler"] for row in found.rows if "straggler" in row]
