"""Axes that undo each other's cut: a fault that two plugins have together."""

from __future__ import annotations

from typing import Any

import pytest
from training import TINY, train_here

from hpctrain.base.errors import HpctrainError

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(4), pytest.mark.shown_on(4)]


def test_an_axis_that_undoes_the_cut_of_another_is_told(root: Any) -> None:
    job = {"name": "faulty", "steps": 4, "output_dir": str(root)}
    tables = {**TINY, "job": job, "plugins": {"load": ["faulty.between_ranks"]}}
    with pytest.raises(HpctrainError, match=r"cut head\.weight in apply anew, which the axis yp had cut"):
        train_here({**tables, "parallelism": {"cuts-first": 2, "cuts-anew": 2}})
