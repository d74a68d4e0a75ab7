"""The arithmetic of benchmarks: spread, the parts of a step, efficiency; and the tables of a measured job."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hpctrain_tools.bench import measuring, spread, start_measuring
from hpctrain_tools.bench.figures import Figure, Ratio
from hpctrain_tools.bench.peers import Peer, PeersResult
from hpctrain_tools.bench.running import measure
from hpctrain_tools.bench.scaling import batches, numbers, places
from hpctrain_tools.bench.step import plain_loop, split
from hpctrain_tools.bench.tables import measured_tables
from hpctrain_tools.bench.task import Step
from hpctrain_tools.bench.trainers import Trainer
from hpctrain_tools.bench.turns import Turn
from hpctrain_tools.commands import bench_scaling
from jobs import TINY, JobFile

from hpctrain.base.errors import UsageError
from hpctrain.job.problems import JobError


@pytest.mark.parametrize("values", [[3.0], [1.0, 2.0], [5.0, 1.0, 4.0, 2.0], [0.1 * n**2 for n in range(31)]])
def test_the_spread_is_that_of_numpy(values: list[float]) -> None:
    assert [spread(values).median, spread(values).low, spread(values).high] == pytest.approx(
        np.percentile(values, [50, 25, 75])
    )


def test_every_part_of_a_row_is_one_of_the_step() -> None:
    rows = [
        {"step_seconds": 1.0, "seconds": {"data": 0.1, "new": 0.5 + n, "save": 0.0}, "loss": 2.0}
        for n in (0.0, 0.1, 0.2)
    ]
    found = split(rows)
    assert list(found) == ["data", "new"] and found["new"].seconds == 0.6


def test_numbers_of_ranks_and_their_batches() -> None:
    assert numbers("4,1,2,2") == [1, 2, 4]
    assert batches({"batch": {"global_size": 12}}, [2, 4], weak=False) == [("global_size", 12)] * 2
    assert batches({"batch": {"tokens": 12}}, [2, 3], weak=True) == [("tokens", 12), ("tokens", 18)]
    for text in ("", "0", "-1,2", "1;2"):
        with pytest.raises(UsageError, match="expected numbers of ranks"):
            numbers(text)
    with pytest.raises(UsageError, match="expected a whole number"):
        batches({"batch": {"global_size": 3}}, [2, 3], weak=True)


def test_the_efficiency_is_ideal_to_measured() -> None:
    found: list[dict[str, Any]] = [
        {"ranks": ranks, "seconds": seconds, "low": seconds, "high": seconds, "reference": None, "ratio": None}
        for ranks, seconds in ((2, 6.0), (4, 4.0), (6, 2.0))
    ]
    assert [one.efficiency for one in places(found, [12] * 3, weak=False)] == [1.0, 0.75, 1.0]
    assert [one.efficiency for one in places(found, [12, 24, 36], weak=True)] == [1.0, 1.5, 3.0]


def test_losses_that_differ() -> None:
    mine = Turn("hpctrain", losses=[2.0, 1.0, 0.5])
    assert Turn("other", losses=[2.0, 1.0, 0.6]).difference(mine, 2) == 0
    assert Turn("other", losses=[2.0, 1.0, 0.6]).difference(mine, 3) == pytest.approx(0.2)
    assert Turn("other", losses=[2.0, float("nan"), 0.5]).difference(mine, 3) == float("inf")


def test_a_measured_job_saves_nothing_and_is_long_enough() -> None:
    tables = copy.deepcopy(TINY) | {
        "evaluation": {"every_steps": 1},
        "checkpoint": {"every_steps": 1},
        "hook": [{"name": "ema"}],
    }
    before = copy.deepcopy(tables)
    made = measured_tables(tables, 30, "/scratch/run")
    assert tables == before and made["job"]["output_dir"] == "/scratch/run" and made["job"]["steps"] > 30
    assert not {"evaluation", "checkpoint", "logger"} & made.keys() and made["hook"][0] == {"name": "ema"}
    assert measured_tables({"job": {"epochs": 2}}, 30, "x")["job"].keys() == {"steps", "output_dir"}


def test_losses_that_are_no_numbers_are_null_in_json() -> None:
    nan, inf = float("nan"), float("inf")
    found = [
        Peer(name, Figure.of([1.0]), Ratio.of([1.0]), losses, difference)
        for name, losses, difference in (("hpctrain", [nan, 2.0], inf), ("ddp", [3.0, inf], inf))
    ]
    result = json.dumps(PeersResult("tiny", 2, 1, 1e-3, found, {}).as_dict(), allow_nan=False)
    mine, ddp = json.loads(result)["trainers"]
    assert (mine["losses"], ddp["losses"], ddp["difference"]) == ([None, 2.0], [3.0, None], None)


def test_a_rank_without_labels_trains_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(3))

    class Unlabelled(Trainer):
        """The loss of no label is a sum of nothing."""

        def __init__(self) -> None:
            self._task: Any = SimpleNamespace(ranks=2, device=torch.device("cpu"))
            self._limit, self._optimizer = None, torch.optim.SGD([weight], lr=0.1)
            self._module = lambda batch: (weight * batch["x"])[:0].sum()

    step = Step([{"x": torch.ones(3)}], count=4, own_count=0, rates=[0.1], draws=[])
    assert Unlabelled().step(step) == 0 and weight.tolist() == [1.0] * 3


def test_a_measurement_that_takes_too_long_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    monkeypatch.setattr(measuring, "_TIME_LIMIT", 0.0)
    with pytest.raises(UsageError, match="hpctrain bench machine took more than 0 s on 1 rank and was ended"):
        start_measuring(1, ["machine"], as_json=True)


def test_a_wrong_job_is_told_before_its_tables_are_changed(tmp_path: Path) -> None:
    """On ranks of a launcher, and by `scaling`, which changes the batch."""
    job = JobFile(tmp_path).set(job={"steps": "many"})
    with pytest.raises(JobError, match=r"\[job\] steps"):
        measure(job.path, [], None, 1, plain_loop)
    job.tables = {**copy.deepcopy(TINY), "batch": 3}
    job.write()
    with pytest.raises(JobError, match="batch"):
        bench_scaling.command.main([str(job.path)], standalone_mode=False)
