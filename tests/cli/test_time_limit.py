"""A job that runs out of time, or gets a signal, saves and stops early enough, and the same command continues it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from jobs import JobFile
from launching import hpctrain, run, started, wait_until


@pytest.fixture
def slow(job: JobFile) -> JobFile:
    """24 steps that take ten seconds."""
    return job.sleeps(0.4).set(job={"steps": 24}, plugins={"load": ["slow"]})


@pytest.mark.nightly
def test_it_stops_in_time_and_continues_until_it_is_done(slow: JobFile, tmp_path: Path) -> None:
    environment = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    whole = run(hpctrain("run", "job.toml", "--set", "job.output_dir=whole"), tmp_path, 60, environment)
    assert whole.code == 0, whole
    words, codes = hpctrain("run", "job.toml", "-n", "2", "--set", "job.time_limit=12s"), []
    while not codes or (codes[-1] == 75 and len(codes) < 12):
        done = run(words, tmp_path, 60, environment)
        codes.append(done.code)
        if done.code == 75:
            assert "as its time is nearly over, saved in" in done.out, done
    assert codes[-1] == 0 and len(codes) > 1, codes
    assert slow.losses() == pytest.approx(slow.losses("whole"), rel=2e-6)


@pytest.mark.nightly
def test_the_end_of_a_slurm_job_is_known(slow: JobFile, tmp_path: Path) -> None:
    end = int(time.time()) + 12
    environment = {
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_END_TIME": str(end),
    }
    words = hpctrain("run", "job.toml", "--set", "job.steps=1000")
    done = run(words, tmp_path, 60, environment)
    assert done.code == 75 and "as its time is nearly over" in done.out, done
    assert time.time() < end


@pytest.mark.nightly
def test_ranks_that_start_again_have_the_time_that_is_left(slow: JobFile, tmp_path: Path) -> None:
    """Rank 1 dies in its twelfth step."""
    plugin = tmp_path / "slow.py"
    plugin.write_text(
        plugin.read_text()
        + "    die(step)\n\n\ndef die(step):\n    import os, pathlib\n    mark = pathlib.Path('died')\n"
        "    if step == 12 and os.environ['RANK'] == '1' and not mark.exists():\n        mark.touch()\n        os._exit(9)\n"
    )
    environment = {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    words = ["run", "job.toml", "-n", "2", "--restarts", "1", "--set", "job.time_limit=24s", "--set", "job.steps=1000"]
    begin = time.monotonic()
    done = run(hpctrain(*words), tmp_path, 90, environment)
    assert done.code == 75 and "as its time is nearly over" in done.out and "restart 1 of 1" in done.err, done
    assert time.monotonic() - begin < 24, done


LONG = """
import pathlib, time
import torch
from torch import nn

class Net(nn.Linear):
    "Its evaluations take half a minute each."
    def __init__(self):
        super().__init__(4, 3)
    def forward(self, x):
        if not self.training and not pathlib.Path("quick").exists():
            pathlib.Path("evaluated").open("a").write(".")
            time.sleep(0.3)
        return super().forward(x)

def loss(out, y):
    return ((out - y) ** 2).mean(1)

def data(split):
    return [(torch.full((4,), float(i % 7)), torch.zeros(3)) for i in range(100)]
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("asked", ["SIGTERM", pytest.param("time limit", marks=pytest.mark.nightly)])
def test_an_evaluation_is_cut_short_and_made_up_for(asked: str, job: JobFile, tmp_path: Path) -> None:
    """The averages of the weights, which are evaluated in their place, must not be what is saved."""
    (tmp_path / "long.py").write_text(LONG)
    job.tables |= {"model": {"name": "long:Net", "loss": "long:loss"}, "dataset": {"name": "long:data"}}
    job.tables |= {"hook": [{"name": "ema", "decay": 0.5}], "evaluation": {"every_steps": 3}}
    job.set(job={"steps": 9}, batch={"global_size": 4, "micro_size": 1})
    (tmp_path / "quick").touch()
    assert run(hpctrain("run", "job.toml", "-n", "2", "--set", "job.output_dir=whole"), tmp_path).code == 0
    (tmp_path / "quick").unlink()
    limit = ["--set", "job.time_limit=15s"] if asked == "time limit" else []
    begin = time.monotonic()
    with started(hpctrain("run", "job.toml", "-n", "2", *limit), tmp_path) as command:
        seen = tmp_path / "evaluated"  # the look at the evaluation is two of these
        wait_until(lambda: seen.exists() and seen.stat().st_size > 3, 60, "an evaluation")
        if asked == "SIGTERM":
            begin = time.monotonic()
            command.process.terminate()
        done = command.finish(60)
    assert time.monotonic() - begin < (10 if asked == "SIGTERM" else 15)
    assert done.code == 75 and "stopped at step 3 of 9" in done.out, done
    assert "evaluation   of step 3 left out: the job has to stop" in done.out, done
    (tmp_path / "quick").touch()
    assert run(hpctrain("run", "job.toml", "-n", "2"), tmp_path).code == 0
    assert job.losses() == job.losses("whole")
    assert evaluations(job.output) == evaluations(tmp_path / "whole")


def evaluations(output: Path) -> dict[int, float]:
    rows = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["evaluation_loss"] for row in rows if "evaluation_loss" in row}
