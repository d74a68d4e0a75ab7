"""The group of `--late` finds what it is for: reads before a wait, and buffers that are used again before it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from late_group import LateError, LateGroup

import hpctrain.mpi
from hpctrain.mpi.process_group import creation

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.shown_on(2, 3)]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    monkeypatch.setattr(creation, "MPIProcessGroup", LateGroup)
    group = dist.new_group(backend=hpctrain.mpi.BACKEND)
    assert isinstance(group, dist.ProcessGroup)
    yield group
    dist.destroy_process_group(group)


def test_results_come_with_the_wait(late: dist.ProcessGroup) -> None:
    mine, everyone = torch.tensor([late.rank()]), torch.empty(late.size(), dtype=torch.int64)
    total = torch.full((2, 3), late.rank() + 1.0).T  # not contiguous
    gathering = dist.all_gather_single(everyone, mine, group=late, async_op=True)
    summing = dist.all_reduce(total, group=late, async_op=True)
    assert gathering is not None and summing is not None
    assert total.isnan().all() and (everyone > late.size()).all()
    summing.wait()
    gathering.wait()
    assert everyone.tolist() == list(range(late.size()))
    assert total.unique().tolist() == [sum(range(1, late.size() + 1))]


def test_a_synchronous_operation_gives_no_handle(late: dist.ProcessGroup) -> None:
    options = dist.AllreduceOptions()
    options.asyncOp = False
    total = torch.ones(3)
    assert late.allreduce([total], options) is None and total.tolist() == [late.size()] * 3


@pytest.mark.parametrize("changed", ["input", "output"])
def test_a_tensor_that_is_used_before_the_wait_is_told(late: dist.ProcessGroup, changed: str) -> None:
    tensors = {"input": torch.ones(late.size(), 2), "output": torch.empty(2)}
    work = dist.reduce_scatter_single(tensors["output"], tensors["input"], group=late, async_op=True)
    assert work is not None
    tensors[changed][0] = 0
    with pytest.raises(LateError, match=r"reduce_scatter_\w+ has changed before its wait"):
        work.wait()


def test_a_message(late: dist.ProcessGroup) -> None:
    """From each rank to the next."""
    sent, received = torch.tensor([float(late.rank())]), torch.zeros(1)
    works = [
        dist.isend(sent, group=late, group_dst=(late.rank() + 1) % late.size()),
        dist.irecv(received, group=late, group_src=(late.rank() - 1) % late.size()),
    ]
    assert received.isnan()
    for work in works:
        assert work is not None
        work.wait()
    assert received.item() == (late.rank() - 1) % late.size()
