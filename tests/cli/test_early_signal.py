"""A signal that comes before the ranks can train stops the job before its first step."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from conftest import JobFile
from launching import SOON, hpctrain, run, started, wait_until


def answers(process: int, number: int) -> bool:
    """Whether the process has a handler for a signal."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.thorough
def test_usr1_during_the_start(job: JobFile, tmp_path: Path) -> None:
    job.set(job={"steps": 1000})
    with started(hpctrain("run", "job.toml"), tmp_path) as command:
        wait_until(lambda: answers(command.process.pid, signal.SIGUSR1), 30, "a handler for SIGUSR1")
        assert not (tmp_path / "out").exists()  # it has not begun
        command.process.send_signal(SOON)
        done = command.finish(60)
    assert done.code == 75, done
    assert "stopped at step 0 of 1000, before anything was trained" in done.out, done
    assert run(hpctrain("run", "job.toml", "--set", "job.steps=2"), tmp_path).code == 0, "the same command continues"
