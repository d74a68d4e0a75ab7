"""Groups around other groups: `[communicator] check`, which compares each collective between the ranks, and gloo's waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_ranks import World

from hpctrain.mpi import OperationMismatchError
from hpctrain.ranks.backends import gloo_backend, mpi_backend
from hpctrain.ranks.timed_gloo import TimedGroup, timed
from hpctrain.ranks.watchdog.comparison import compared


@pytest.fixture(scope="module", params=["timed", "mpi", "gloo"])
def any_group(request: pytest.FixtureRequest, world: World) -> Iterator[dist.ProcessGroup]:
    """gloo's waits alone; compared, over MPI and over that."""
    backend, options = (f"cpu:{mpi_backend()}", None) if request.param == "mpi" else timed(gloo_backend(), None)
    if request.param != "timed":
        backend, options = compared(backend, options)
    made = dist.new_group(backend=backend, pg_options=options)
    yield made
    dist.destroy_process_group(made)


@pytest.fixture
def group(any_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group that compares."""
    if isinstance(any_group, TimedGroup):
        pytest.skip("compares nothing")
    return any_group


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
def test_an_operation_has_its_result(any_group: dist.ProcessGroup, world: World, name: str) -> None:
    torch.testing.assert_close(OPERATIONS[name](any_group, world), OPERATIONS[name](world.gloo, world), rtol=0, atol=0)


def test_torch_finds_gloo_in_a_timed_group(any_group: Any, recwarn: pytest.WarningsRecorder) -> None:
    """DCP asks for the kinds of devices, others for the time limit."""
    if not isinstance(any_group, TimedGroup):
        pytest.skip("is none")
    assert any_group._device_types == [torch.device("cpu")]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=50), any_group)
    assert not recwarn.list and any_group.group_name == any_group.inner.group_name


def test_a_group_of_some_ranks_compares_too(group: dist.ProcessGroup, world: World) -> None:
    """A job's other groups are made without a backend: it is the world's. Here the world's has another name."""
    some = dist.new_group([0], backend="compared", pg_options=group.comparison)  # type: ignore[attr-defined]
    if world.rank == 0:
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=some)
        assert tensor.tolist() == [1, 1]
        dist.destroy_process_group(some)


def _ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


class _Reduced(torch.autograd.Function):
    """All-reduces its gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
MISMATCHES: dict[str, tuple[Callable[[Any, bool], Any], tuple[str, str]]] = {
    "shape": (
        lambda group, last: dist.all_reduce(_ones(4, 2) if last else _ones(2, 4), group=group),
        ("all_reduce (2, 4) float32 sum", "all_reduce (4, 2) float32 sum"),
    ),
    "dtype": (
        lambda group, last: dist.all_reduce(_ones(4, dtype=torch.float64 if last else torch.float32), group=group),
        ("all_reduce (4,) float32 sum", "all_reduce (4,) float64 sum"),
    ),
    "reduction": (
        lambda group, last: dist.all_reduce(_ones(4), _MAX if last else _SUM, group=group),
        ("all_reduce (4,) float32 sum", "all_reduce (4,) float32 max"),
    ),
    "root": (
        lambda group, last: dist.broadcast(_ones(4), int(last), group=group),
        ("broadcast (4,) float32 root 0", "broadcast (4,) float32 root 1"),
    ),
    "operation": (
        lambda group, last: dist.barrier(group=group) if last else dist.broadcast(_ones(4), 0, group=group),
        ("broadcast (4,) float32 root 0", "barrier"),
    ),
    "order": (
        lambda group, last: [dist.all_reduce(_ones(size), group=group) for size in ((8, 4) if last else (4, 8))],
        ("all_reduce (4,) float32 sum", "all_reduce (8,) float32 sum"),
    ),
    "many tensors": (
        lambda group, last: group.allreduce([_ones(3 + last * (n == 299)) for n in range(300)]).wait(),
        ("all_reduce 300 x (3,) float32", "all_reduce 299 x (3,) float32 (4,) float32"),
    ),
    "in backward": (
        lambda group, last: _Reduced.apply(torch.ones(3 + last, requires_grad=True), group).sum().backward(),
        ("all_reduce (3,) float32 sum", "all_reduce (4,) float32 sum"),
    ),
    "asynchronous": (
        lambda group, last: dist.all_gather_into_tensor(
            _ones(dist.get_world_size(), 3 + last), _ones(3 + last), group=group, async_op=True
        ),
        ("all_gather_into_tensor (3,) float32", "all_gather_into_tensor (4,) float32"),
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", MISMATCHES)
def test_a_mismatch_names_ranks_shapes_and_lines(group: dist.ProcessGroup, world: World, kind: str) -> None:
    call, (others, last) = MISMATCHES[kind]
    with pytest.raises(OperationMismatchError) as caught:
        call(group, world.rank == world.size - 1)
    lines = str(caught.value).splitlines()
    names = "rank 0" if world.size == 2 else f"ranks 0-{world.size - 2}"
    assert lines[1].startswith(f"  {names}: {others}, at ") and "test_comparison.py:" in lines[1], lines
    assert lines[2].startswith(f"  rank {world.size - 1}: {last}, at ") and "test_comparison.py:" in lines[2], lines
    assert len(lines) == 3
    tensor = torch.full((2,), float(world.rank))
    dist.all_reduce(tensor, group=group)  # no data was moved: the group goes on
    assert tensor[0].item() == sum(range(world.size))
