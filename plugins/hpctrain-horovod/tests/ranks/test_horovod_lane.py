"""The data path of an accelerator's tensors: the group that torch makes by default for a kind of device, here for the CPU."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hpctrain_horovod.engine.lane import Lane, accelerator_group

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.shown_on(3)]


@pytest.fixture
def options() -> Any:
    """The description of a group of all ranks, as the worlds of Horovod make it."""
    store = dist.PrefixStore("of an accelerator", dist.distributed_c10d._get_default_store())
    return SimpleNamespace(
        store=store, group_rank=dist.get_rank(), group_size=dist.get_world_size(), group_id="of an accelerator",
        global_ranks_in_group=list(range(dist.get_world_size())), timeout=timedelta(seconds=30),
    )  # fmt: skip


def test_each_operation_of_a_lane(options: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    lane = Lane(accelerator_group(torch.device("cpu"), options), rank, size, averages=False)
    total = torch.full((5,), rank + 1.0)
    lane.all_reduce(total, "Average")
    assert total.tolist() == [(size + 1) / 2] * 5
    gathered = [torch.empty(2) for _ in range(size)]
    lane.all_gather(gathered, torch.full((2,), float(rank)))
    assert [one.tolist() for one in gathered] == [[float(one)] * 2 for one in range(size)]
    share = torch.empty(2)
    lane.reduce_scatter(share, torch.arange(2.0 * size), "Sum")
    assert share.tolist() == [2.0 * rank * size, (2.0 * rank + 1) * size]
    sent = torch.full((3,), float(rank))
    lane.broadcast(sent, size - 1)
    assert sent.tolist() == [size - 1.0] * 3
    received = torch.empty(size)
    lane.all_to_all(received, torch.arange(float(size)) + 10 * rank, [1] * size, [1] * size)
    assert received.tolist() == [rank + 10.0 * one for one in range(size)]


def test_a_kind_of_device_without_communication_is_told(options: Any) -> None:
    with pytest.raises(OSError, match="found tensors on meta, between which torch has no communication"):
        accelerator_group(torch.device("meta"), options)
    if not torch.cuda.is_available():
        with pytest.raises(OSError, match="found tensors on cuda and the backend 'nccl', which this torch lacks"):
            accelerator_group(torch.device("cuda"), options)
