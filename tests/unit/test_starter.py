"""Ranks that are started as processes, without MPI."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpctrain.starter import processes
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
