"""Ranks that are forked from a process that has imported torch: they train what `[job] start = "spawn"` does."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest
from jobs import JobFile
from launching import Finished, hpctrain, run, started, wait_until

COUNTING = """
import os
import random
import sys

import numpy as np
import torch
from torch import nn

WORDS, RANK = sys.argv[1:3], os.environ.get("RANK") or os.environ["PMI_RANK"]
with open("imports", "a") as file:
    file.write(f"{os.getpid()} {os.environ.get('OMP_THREAD_LIMIT')}\\n")


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(64, 8), nn.Linear(8, 64)

    def forward(self, ids):
        return self.out(self.table(ids))


def model(**_):
    told = {
        "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "argv": sys.argv[1:3], "at_import": WORDS,
        "rank": RANK, "shared": torch.initial_seed(), "own": [random.random(), float(np.random.random())],
    }
    import json
    with open(f"rank-{os.environ['RANK']}.json", "a") as file:
        file.write(json.dumps(told) + "\\n")
    return Words()


def loss(outputs, target):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), target.flatten())
"""


@pytest.fixture
def counting(job: JobFile) -> JobFile:
    """A job with a model of its own, whose module writes down each of its imports."""
    (job.directory / "mine.py").write_text(COUNTING)
    job.tables["model"] = {"name": "mine:model", "loss": "mine:loss"}
    job.tables["dataset"] = {"name": "mine_data:tokens"}
    (job.directory / "mine_data.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n\n\ndef tokens(split):\n"
        "    data = torch.arange(480 * 8).view(480, 8) % 64\n    return TensorDataset(data, data.roll(1, 1))\n"
    )
    return job.set(environment={"OMP_THREAD_LIMIT": "77"})


def told_by_ranks(job: JobFile, ranks: int) -> list[dict[str, Any]]:
    """The last record of each rank."""
    files = [job.directory / f"rank-{rank}.json" for rank in range(ranks)]
    return [json.loads(file.read_text().splitlines()[-1]) for file in files]


def imports(job: JobFile) -> list[str]:
    """A line for each import, with the process and OMP_THREAD_LIMIT."""
    return (job.directory / "imports").read_text().splitlines()


def train(job: JobFile, *words: str, env: dict[str, str] | None = None) -> Finished:
    return run(hpctrain("run", "job.toml", "-n", "3", *words), job.directory, 120, env)


@pytest.mark.thorough
def test_ranks_train_as_those_that_are_started_anew(counting: JobFile) -> None:
    forked = train(counting, "--set", "job.output_dir=forked")
    assert forked.code == 0 and not forked.err, forked
    warm = told_by_ranks(counting, 3)
    spawned = train(counting, "--set", "job.output_dir=spawned", "--set", "job.start=spawn")
    assert spawned.code == 0, spawned
    cold = told_by_ranks(counting, 3)
    assert [line.split()[1] for line in imports(counting)] == ["77"] * 6, "by each rank, with [environment]"
    assert len({one["parent"] for one in warm}) == 1
    for ranks in (warm, cold):
        assert len({one["shared"] for one in [*warm, *cold]}) == 1, "torch's generator begins alike everywhere"
        assert all(len({one["own"][kind] for one in ranks}) == 3 for kind in (0, 1)), "random and numpy differ"
        assert all(one["session"] == one["pid"] and one["argv"] == ["run", "job.toml"] for one in ranks)
        assert all(one["at_import"] == one["argv"] for one in ranks)
        assert [one["rank"] for one in ranks] == ["0", "1", "2"], "known when the job's module is imported"
    assert counting.losses("forked") == counting.losses("spawned")


@pytest.mark.thorough
def test_a_killed_rank_is_forked_again(counting: JobFile) -> None:
    counting.sleeps(0.1).set(plugins={"load": ["slow"]}, job={"steps": 400}, checkpoint={"every_steps": 1, "keep": 1})
    words = hpctrain("run", "job.toml", "-n", "3", "--restarts", "1")
    with started(words, counting.directory) as command:
        counting.wait_for_steps(2)
        first = {one["pid"] for one in told_by_ranks(counting, 3)}
        assert first == {one.pid for one in command.ranks()}
        command.ranks()[1].kill()
        wait_until(lambda: len(told_of_rank(counting, 0)) == 2, 60, "another start")
        counting.wait_for_steps(len(counting.rows()) + 2)
        ranks = command.ranks()
        assert len(ranks) == 3 and {one.ppid() for one in ranks} == {command.process.pid}
        ranks[2].kill()
        done = command.finish(60)
    assert done.code == 4 and "restart 1 of 1" in done.err, done


def told_of_rank(job: JobFile, rank: int) -> list[str]:
    file = job.directory / f"rank-{rank}.json"
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.nightly
def test_a_module_that_cannot_be_imported_is_reported_as_ever(counting: JobFile) -> None:
    (counting.directory / "mine.py").write_text("import does_not_exist\n")
    forked, spawned = train(counting), train(counting, "--set", "job.start=spawn")
    assert forked.code == spawned.code == 2 and forked.err == spawned.err and "does_not_exist" in forked.err, forked


@pytest.mark.nightly
def test_workers_end_with_a_killed_rank(counting: JobFile) -> None:
    counting.set(dataset={"workers": 2}, evaluation={"every_steps": 2, "batches": 1})
    forked = train(counting, "--set", "job.output_dir=forked")
    assert forked.code == 0, forked
    alone = train(counting, "--set", "job.output_dir=alone", "--set", "dataset.workers=0")
    assert alone.code == 0 and counting.losses("alone") == counting.losses("forked"), alone
    counting.sleeps(0.1).set(plugins={"load": ["slow"]}, job={"steps": 400})
    with started(hpctrain("run", "job.toml", "-n", "3"), counting.directory) as command:
        counting.wait_for_steps(1)
        assert len(command.ranks()) == 3 and len(command.members()) > 3 + 3 * 3
        command.ranks()[1].kill()
        assert command.finish(60).code == 4


@pytest.mark.nightly
def test_workers_start_anew_where_a_server_cannot_be_sent_the_data(counting: JobFile) -> None:
    data = counting.directory / "mine_data.py"
    data.write_text(
        data.read_text().replace("TensorDataset(data, data.roll(1, 1))", "[(row, row.roll(1)) for row in data]")
    )
    for workers in (0, 1):
        words = hpctrain(
            "run", "job.toml", "--set", f"dataset.workers={workers}", "--set", f"job.output_dir=with-{workers}"
        )
        done = run(words, counting.directory)
        assert done.code == 0, done
    assert counting.losses("with-0") == counting.losses("with-1")
    log = (counting.directory / "with-1" / "log" / "rank-00000.log").read_text()
    assert "more tensors than a fork server takes: 1 workers start anew" in log


@pytest.mark.nightly
def test_a_killed_starter_leaves_nothing(counting: JobFile) -> None:
    counting.sleeps(0.1).set(plugins={"load": ["slow"]}, job={"steps": 400})
    with started(hpctrain("run", "job.toml", "-n", "3"), counting.directory) as command:
        counting.wait_for_steps(1)
        os.kill(command.process.pid, signal.SIGKILL)
        assert command.finish(60).code == -signal.SIGKILL
