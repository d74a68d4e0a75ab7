"""The starter of ranks: as processes, without MPI, and what it passes on; what signals do to a rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.loop import signals
from hpctrain.loop.signals import StopRequest
from hpctrain.starter import processes, start
from hpctrain.starter.processes import Processes


def test_ranks_that_do_not_follow_a_failed_one_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a starter that asks again and again, between looks for signals."""
    monkeypatch.setattr(processes, "_GRACE", 0.3)
    program = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(4)\ntime.sleep(60)"
    ranks = Processes([sys.executable, "-S", "-c", program], 2)
    for _ in range(100):
        try:
            assert ranks.wait(timeout=0.1) != 0
            return
        except subprocess.TimeoutExpired:
            continue
    ranks.kill()
    pytest.fail("a rank was left running")


def test_one_signal_that_comes_twice_is_one_request_and_a_later_one_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm signals all processes of a job: a rank gets its own, and what the starter passes on."""
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    with StopRequest() as stop:
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
        assert stop.requested and not left
        monkeypatch.setattr(signals, "_SAME_SECONDS", 0.0)
        signal.raise_signal(signal.SIGUSR1)
        assert not left
        signal.raise_signal(signal.SIGINT)
        assert left == [128 + signal.SIGINT]


class Shell:
    """In mpiexec's place, which ends its ranks when it can't write what they print."""

    def command(self, ranks: int) -> list[str]:
        return ["bash", "-c", "for i in $(seq $1); do echo $i || exit 255; echo $i >&2; done", "_"]

    def environment(self, ranks: int) -> dict[str, str]:
        return {}


def test_ranks_outlive_output_that_nobody_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    link = start.Link(tmp_path)
    kept = os.dup(1)
    with open("/dev/full", "w") as full:
        os.dup2(full.fileno(), 1)
        monkeypatch.setattr(sys, "stdout", full)
        try:
            status = start._run(link, Shell(), ["3"], 3, [])  # type: ignore[arg-type]
        finally:
            os.dup2(kept, 1)
            os.close(kept)
    link.close()
    assert status == 0 and capfd.readouterr().err == "1\n2\n3\n"
