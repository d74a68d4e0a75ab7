"""The quick form of benchmarks/checkpoint_kills.py: SIGKILL of one rank and of all while they save together."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import run

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "checkpoint_kills.py"


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize(
    ("who", "ranks"),
    [
        pytest.param("all", 2, marks=pytest.mark.nightly),
        pytest.param("one", 2, marks=pytest.mark.nightly),
        ("one", 3),
    ],
)
def test_ranks_that_are_killed_leave_a_whole_checkpoint(who: str, ranks: int, tmp_path: Path) -> None:
    words = [sys.executable, str(SCRIPT), "--kills", "10", "--who", who, "--ranks", str(ranks)]
    done = run(words, tmp_path, timeout=200)
    assert done.code == 0 and done.out.startswith("10 kills of ") and "none torn or lost" in done.out, done
