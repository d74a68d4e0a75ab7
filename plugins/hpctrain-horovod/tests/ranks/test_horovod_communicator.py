"""The communicator horovod, on a real Horovod where one is installed, else on hpctrain_horovod; compared with gloo."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import hpctrain_horovod.torch as shim
import pytest
import torch
import torch.distributed as dist
from hpctrain_horovod.communicator import plugin
from torch import Tensor

from hpctrain.api import Options

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG
METHODS: dict[Any, str] = {
    SUM: "sum", AVG: "mean", dist.ReduceOp.MIN: "amin", dist.ReduceOp.MAX: "amax", dist.ReduceOp.PRODUCT: "prod",
}  # fmt: skip
"""A tensor's methods that do the same."""
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
]


def installed() -> ModuleType:
    try:
        import horovod.torch as real
    except ImportError:
        return shim
    return real


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    before = plugin._horovod
    plugin._horovod = installed
    backend = plugin.Horovod(Options()).backend()
    yield dist.new_group(backend=backend.partition(":")[2])
    plugin._horovod = before
    if dist.get_world_size() > 1:
        installed().shutdown()


def values(world: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small integers, which every sum holds exactly; others on each rank."""
    generator = torch.Generator().manual_seed(world.rank)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@pytest.mark.parametrize("op", METHODS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(world: Any, group: dist.ProcessGroup, op: Any, dtype: torch.dtype) -> None:
    if dtype.is_complex and op != SUM:
        pytest.skip("complex numbers have no order, and their parts are not multiplied by themselves")
    if op == AVG and not dtype.is_floating_point:
        if world.size > 1:
            with pytest.raises(ValueError, match="expected a floating-point tensor"):
                dist.all_reduce(values(world, (2,), dtype), op, group=group)
        return
    for shape in [(), (0,), (5,), (3, 4)]:
        mine = values(world, shape, dtype)
        parts = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(parts, mine, group=world.gloo)
        stacked = torch.stack(parts)
        exact = stacked.to(torch.complex128 if dtype.is_complex else torch.float64)
        expected = getattr(exact, METHODS[op])(0)
        assert dist.all_reduce(mine, op, group=group) is None
        torch.testing.assert_close(mine, expected.to(dtype))


def test_all_reduce_of_a_tensor_that_is_not_contiguous(world: Any, group: dist.ProcessGroup) -> None:
    whole = torch.zeros(4, 6)
    part = whole.t()[1:3]
    part += world.rank + 1
    dist.all_reduce(part, group=group)
    total = world.size * (world.size + 1) / 2
    assert (part == total).all() and whole.sum() == total * part.numel()


def test_what_may_overflow_or_is_large(world: Any, group: dist.ProcessGroup) -> None:
    large = torch.full((3,), 40000.0, dtype=torch.float16)
    dist.all_reduce(large, AVG, group=group)
    assert large.tolist() == [40000.0] * 3
    many = [torch.full((2,), float(number)) for number in range(70)]
    dist.all_reduce_coalesced(many, group=group)
    assert [one[0].item() for one in many] == [float(number * world.size) for number in range(70)]


def test_finished_operations_hold_no_tensors(world: Any, group: dist.ProcessGroup) -> None:
    seen = []
    for _ in range(3):
        output = torch.empty(4 * world.size)
        dist.all_gather_into_tensor(output, torch.ones(4), group=group)
        seen.append(weakref.ref(output))
        del output
    assert all(one() is None for one in seen)


@pytest.mark.ranks(2)
def test_a_rank_that_comes_late(world: Any, group: dist.ProcessGroup) -> None:
    """The others' wait has a limit, also in a barrier; then the group works again."""
    group.set_timeout(timedelta(seconds=0.5))
    if world.rank == 1:
        world.gloo.barrier().wait()  # the others have given up
        group.set_timeout(timedelta(seconds=20))
        dist.barrier(group=group)
    else:
        with pytest.raises(TimeoutError, match=r"allreduce.* over Horovod has not finished within 0.5 s"):
            dist.barrier(group=group)
        world.gloo.barrier().wait()
    group.set_timeout(timedelta(seconds=20))
    part = torch.ones(5)
    dist.all_reduce(part, group=group)
    assert part.tolist() == [world.size] * 5


def test_many_at_once(world: Any, group: dist.ProcessGroup) -> None:
    """More than may be in flight of one kind; waited for in another order, the last by its future."""
    tensors = [torch.full((8,), float(number + world.rank)) for number in range(150)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    futures = works[-1].get_future()
    for work in reversed(works[:-1]):
        work.wait()
    assert futures.wait()[0] is tensors[-1]
    ranks = sum(range(world.size))
    assert [tensor[0].item() for tensor in tensors] == [number * world.size + ranks for number in range(150)]
    assert all(work.is_completed() and work.is_success() for work in works)


@pytest.mark.parametrize("op", [SUM, AVG], ids=str)
def test_reduce_scatter(world: Any, group: dist.ProcessGroup, op: Any) -> None:
    for elements in (0, 3):
        mine = values(world, (world.size, elements), torch.float32)
        parts = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(parts, mine, group=world.gloo)
        reduced = torch.stack(parts).sum(0) / (world.size if op == AVG else 1)
        output = torch.empty(elements)
        dist.reduce_scatter_tensor(output, mine.clone(), op, group=group)
        torch.testing.assert_close(output, reduced[world.rank])
        dist.reduce_scatter(output, list(mine.clone().unbind()), op, group=group)
        torch.testing.assert_close(output, reduced[world.rank])


@pytest.mark.ranks(2)
def test_what_horovod_cannot_reduce(world: Any, group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match="expected one of SUM"):
        dist.all_reduce(torch.ones(1, dtype=torch.int32), dist.ReduceOp.BOR, group=group)
    with pytest.raises(ValueError, match="expected SUM or AVG"):
        dist.reduce_scatter_tensor(torch.empty(1), torch.ones(world.size), dist.ReduceOp.MAX, group=group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64], ids=str)
def test_gathering(world: Any, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
    mine = values(world, (3, 2), dtype)
    wanted = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(wanted, mine, group=world.gloo)
    found = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(found, mine, group=group)
    assert all(map(torch.equal, found, wanted))
    output = torch.empty(3 * world.size, 2, dtype=dtype)
    dist.all_gather_into_tensor(output, mine, group=group)
    assert torch.equal(output, torch.cat(wanted))
    root = world.size - 1
    found = [torch.empty_like(mine) for _ in range(world.size)]
    dist.gather(mine, found if world.rank == root else None, dst=root, group=group)
    assert world.rank != root or all(map(torch.equal, found, wanted))
    part = torch.empty_like(mine)
    dist.scatter(part, wanted if world.rank == root else None, src=root, group=group)
    assert torch.equal(part, mine)
    other = mine.clone()
    dist.broadcast(other, src=root, group=group)
    assert torch.equal(other, wanted[root])


def test_parts_of_different_sizes(world: Any, group: dist.ProcessGroup) -> None:
    """The first rank's is empty, and no part begins at a multiple of its width."""
    mine = torch.full((world.rank,), world.rank, dtype=torch.int16)
    found = [torch.empty(rank, dtype=torch.int16) for rank in range(world.size)]
    dist.all_gather(found, mine, group=group)
    assert [part.tolist() for part in found] == [[rank] * rank for rank in range(world.size)]


def test_objects_and_barriers(world: Any, group: dist.ProcessGroup) -> None:
    found: list[Any] = [None] * world.size
    dist.all_gather_object(found, {"rank": world.rank, "text": "x" * world.rank}, group=group)
    assert [one["rank"] for one in found] == list(range(world.size))
    dist.barrier(group=group)


@pytest.mark.ranks(3)
def test_a_part_of_the_ranks_is_refused(world: Any, group: dist.ProcessGroup) -> None:
    if world.rank < 2:
        with pytest.raises(
            plugin.EnvironmentUnfitError, match=r"found rank . of a group of the ranks \[0, 1\], expected"
        ):
            dist.new_group([0, 1], backend="horovod")
    else:
        dist.new_group([0, 1], backend="horovod")
