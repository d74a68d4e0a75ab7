"""`hpctrain run --restarts`: killed ranks start again from the newest checkpoint, and nothing is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs import JobFile
from launching import hpctrain, run

PROGRAMS = Path(__file__).parent / "programs"


def environment(kills: str) -> dict[str, str]:
    return {"KILLS": kills, "PYTHONPATH": f"{PROGRAMS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture
def killed(job: JobFile) -> JobFile:
    return job.set(job={"steps": 9}, checkpoint={"every_steps": 2}, plugins={"load": ["killer"]})


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize("communicator", ["mpi", pytest.param("gloo", marks=pytest.mark.nightly)])
def test_killed_ranks_start_again(communicator: str, killed: JobFile, tmp_path: Path) -> None:
    whole = run(hpctrain("run", "job.toml", "--set", "job.output_dir=whole"), tmp_path, 90, environment(""))
    assert whole.code == 0, whole
    words = hpctrain("run", "job.toml", "-n", "3", "--restarts", "2", "--set", f"communicator.name={communicator}")
    done = run([*words, "--resume", "never"], tmp_path, 120, environment("1:5 0:7"))
    assert done.code == 0, done
    assert "restart 1 of 2" in done.err and "restart 2 of 2" in done.err, done
    assert "resuming     from step 4" in done.out and "resuming     from step 6" in done.out, done
    assert "rank 1 ended without an error message (SIGKILL)" in done.err, done
    assert killed.losses() == pytest.approx(killed.losses("whole"), rel=2e-6)
    assert not (tmp_path / "out.1").exists()


@pytest.mark.nightly
def test_restarts_have_an_end(killed: JobFile, tmp_path: Path) -> None:
    words = hpctrain("run", "job.toml", "-n", "2", "--restarts", "1")
    done = run(words, tmp_path, 120, environment("1:2 1:4"))
    assert done.code == 4 and "restart 1 of 1" in done.err and "restart 2" not in done.err, done
    first, second = done.err.split("restart 1 of 1")
    assert "There is no checkpoint yet: the same command begins at step 0" in first, done
    assert "The same command continues from the newest checkpoint" in second, done
    again = run(hpctrain("run", "job.toml", "-n", "2"), tmp_path, 60, environment(""))
    assert again.code == 0 and "resuming     from step 2" in again.out, again


@pytest.mark.thorough
def test_mistakes_are_not_tried_again(killed: JobFile, tmp_path: Path) -> None:
    killed.set(optimizer={"lr": -1.0})
    done = run(hpctrain("run", "job.toml", "-n", "2", "--restarts", "3"), tmp_path, 60, environment(""))
    assert done.code == 2 and "restart" not in done.err, done
