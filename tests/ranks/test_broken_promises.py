"""Plugins that break a promise of their contract between ranks: tests/faulty.py plants them."""

from __future__ import annotations

from typing import Any

import pytest
from faulty import FAULTS, Fault
from training import TINY, train_here

from hpctrain.errors import HpctrainError

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2), pytest.mark.shown_on(2)]


@pytest.mark.parametrize("fault", [one for one in FAULTS if one.ranks == 2], ids=str)
def test_a_broken_promise_is_told_on_all_ranks(root: Any, fault: Fault) -> None:
    """Each of these would train on in silence with other numbers."""
    with pytest.raises(HpctrainError, match=fault.told):
        train_here(fault.tables_over({**TINY, "job": {"name": "faulty", "steps": 4, "output_dir": str(root)}}))
