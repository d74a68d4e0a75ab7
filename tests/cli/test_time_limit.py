"""A job that runs out of time saves and stops early enough, and the same command continues it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from conftest import JobFile
from launching import hpctrain, run


@pytest.fixture
def slow(job: JobFile) -> JobFile:
    """24 steps that take ten seconds."""
    return job.sleeps(0.4).set(job={"steps": 24}, plugins={"load": ["slow"]})


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
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
