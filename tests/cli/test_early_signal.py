"""A signal that comes before the ranks can train stops the job after its first step, as any other."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from jobs import JobFile
from launching import SOON, hpctrain, started, wait_until


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
    assert "stopped at step 1 of 1000, saved in" in done.out, done
