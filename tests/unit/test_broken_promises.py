"""Plugins that break a promise of their contract: tests/faulty.py plants them. Those that take two ranks are in tests/ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import TINY
from faulty import FAULTS, Fault

import hpctrain
from hpctrain.errors import EXIT_ENVIRONMENT, EXIT_TRAINING, HpctrainError


@pytest.mark.parametrize("fault", [one for one in FAULTS if one.ranks == 1], ids=str)
def test_a_broken_promise_is_told(fault: Fault, tmp_path: Path) -> None:
    """Each of these would train on in silence, with other numbers or into a checkpoint that nobody can read."""
    job = {"name": "faulty", "steps": 4, "output_dir": str(tmp_path / "out")}
    with pytest.raises(HpctrainError, match=fault.told) as told:
        hpctrain.run(fault.tables_over({**TINY, "job": job}))
    assert told.value.exit_code in (EXIT_ENVIRONMENT, EXIT_TRAINING)
