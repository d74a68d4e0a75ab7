"""Plugins that break a promise of their contract between ranks: tests/faulty plants them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from faulty import COMMUNICATORS, FAULTS, Fault, register
from training import TINY, train_here

from hpctrain.base.errors import HpctrainError
from hpctrain.model.conformance.trials import try_communicator

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2), pytest.mark.shown_on(2)]


@pytest.mark.cases(
    thorough=[
        "ModelByRank",
        "MetricOfARank",
        "WholeBatchForAll",
        "OtherSamples",
        "NoSum",
        "MeanOfGradients",
        "NoRefresh",
    ]
)
@pytest.mark.parametrize("fault", [one for one in FAULTS if one.ranks == 2], ids=str)
def test_a_broken_promise_is_told_on_all_ranks(root: Any, fault: Fault) -> None:
    """Each of these would train on in silence with other numbers."""
    with pytest.raises(HpctrainError, match=fault.told):
        train_here(fault.tables_over({**TINY, "job": {"name": "faulty", "steps": 4, "output_dir": str(root)}}))


@pytest.mark.thorough
@pytest.mark.ranks(4)
@pytest.mark.shown_on(4)
def test_an_axis_that_undoes_the_cut_of_another_is_told(root: Any) -> None:
    tables = {**TINY, "job": {"name": "faulty", "steps": 4, "output_dir": str(root)}, "plugins": {"load": ["faulty"]}}
    told = "cut head.weight in apply anew, which the axis yp had cut"
    with pytest.raises(HpctrainError, match=told):
        train_here({**tables, "parallelism": {"cuts-first": 2, "cuts-anew": 2}})


@pytest.mark.parametrize("plugin", COMMUNICATORS)
def test_a_backend_that_gives_other_numbers_is_told(plugin: Any) -> None:
    try_communicator(plugin(None), torch.device("cpu"))
    group = dist.new_group(backend=register(plugin))
    with pytest.raises(HpctrainError, match=plugin.told):
        try_communicator(plugin(None), torch.device("cpu"), group)
    dist.destroy_process_group(group)
