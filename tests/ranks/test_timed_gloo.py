"""Groups of gloo that count callers' waits: every operation has gloo's own result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import World

from hpctrain.ranks.backends import gloo_backend
from hpctrain.ranks.timed_gloo import TimedGroup, timed


@pytest.fixture(scope="module")
def group(world: World) -> Iterator[dist.ProcessGroup]:
    made = dist.new_group(backend=timed(gloo_backend()))
    assert isinstance(made, TimedGroup)
    yield made
    dist.destroy_process_group(made)


OPERATIONS: dict[str, Callable[[dist.ProcessGroup, World], Any]] = {}


def operation(function: Callable[[dist.ProcessGroup, World], Any]) -> Callable[[dist.ProcessGroup, World], Any]:
    OPERATIONS[function.__name__] = function
    return function


@operation
def all_reduce(group: Any, world: World) -> Any:
    tensor = torch.arange(6.0).reshape(2, 3) + world.rank
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor


@operation
def all_reduce_later(group: Any, world: World) -> Any:
    tensors = [torch.full((3,), float(world.rank + n)) for n in range(4)]
    for work in [dist.all_reduce(one, group=group, async_op=True) for one in tensors]:
        work.wait()
    return tensors


@operation
def broadcast(group: Any, world: World) -> Any:
    tensor = torch.full((5,), world.rank)
    dist.broadcast(tensor, world.size - 1, group=group)
    return tensor


@operation
def reduce(group: Any, world: World) -> Any:
    tensor = torch.full((5,), world.rank)
    dist.reduce(tensor, world.size - 1, group=group)
    return tensor if world.rank == world.size - 1 else None


@operation
def all_gather(group: Any, world: World) -> Any:
    every = [torch.empty(2) for _ in range(world.size)]
    dist.all_gather(every, torch.full((2,), float(world.rank)), group=group)
    return every


@operation
def all_gather_into_tensor(group: Any, world: World) -> Any:
    every = torch.empty(2 * world.size)
    dist.all_gather_into_tensor(every, torch.full((2,), float(world.rank)), group=group)
    return every


@operation
def reduce_scatter_tensor(group: Any, world: World) -> Any:
    mine = torch.empty(2)
    dist.reduce_scatter_tensor(mine, torch.arange(2.0 * world.size) * world.rank, group=group)
    return mine


@operation
def all_to_all_single(group: Any, world: World) -> Any:
    sizes = [1 + (world.rank + to) % 2 for to in range(world.size)]
    out = torch.empty(sum(sizes))
    dist.all_to_all_single(out, torch.arange(float(sum(sizes))) + 10 * world.rank, sizes, sizes, group=group)
    return out


@operation
def gather_and_scatter(group: Any, world: World) -> Any:
    is_root = world.rank == 0
    every = [torch.empty(2) for _ in range(world.size)] if is_root else None
    dist.gather(torch.full((2,), float(world.rank)), every, dst=0, group=group)
    mine = torch.empty(2)
    dist.scatter(mine, [one + 1 for one in every] if every else None, src=0, group=group)
    return mine


@operation
def messages(group: Any, world: World) -> Any:
    got = torch.zeros(3)
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.size > 1:
        exchange = [dist.P2POp(dist.isend, torch.full((3,), float(world.rank)), after, group),
                    dist.P2POp(dist.irecv, got, before, group)]  # fmt: skip
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
    return got


@operation
def functional(group: Any, world: World) -> Any:
    from torch.distributed._functional_collectives import all_gather_tensor, all_reduce

    return (
        all_reduce(torch.full((2, 2), float(world.rank)), "sum", group)
        + all_gather_tensor(torch.ones(2, 2), 0, group).sum()
    )


@operation
def barrier(group: Any, world: World) -> Any:
    dist.barrier(group=group)


@operation
def from_any(group: Any, world: World) -> Any:
    if world.rank:
        dist.send(torch.full((2,), float(world.rank)), 0, group=group)
        return None
    got = torch.zeros(2)
    ranks = [dist.recv(got, group=group) for _ in range(world.size - 1)]
    return sorted(ranks)


@operation
def gradients_of_ddp(group: Any, world: World) -> Any:
    """DDP waits by futures, in C++."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    wrapped = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    wrapped(torch.full((2, 3), 1.0 + world.rank)).sum().backward()
    return [parameter.grad.round(decimals=4) for parameter in model.parameters() if parameter.grad is not None]


@operation
def an_object(group: Any, world: World) -> Any:
    every: list[Any] = [None] * world.size
    dist.all_gather_object(every, "x" * world.rank, group=group)
    return [len(one) for one in every]


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_has_its_result(group: dist.ProcessGroup, world: World, name: str) -> None:
    torch.testing.assert_close(OPERATIONS[name](group, world), OPERATIONS[name](world.gloo, world), rtol=0, atol=0)


def test_torch_finds_gloo_in_a_timed_group(group: Any, recwarn: pytest.WarningsRecorder) -> None:
    """DCP asks for the kinds of devices, others for the time limit."""
    assert group._device_types == [torch.device("cpu")]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=50), group)
    assert not recwarn.list and group.group_name == group.inner.group_name
