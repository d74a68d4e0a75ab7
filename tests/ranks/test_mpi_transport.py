"""All routes give the same results: a node's memory, its own buffers, two levels over nodes, and MPI alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from training import job, thorough

import hpctrain.mpi
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.mpi import BACKEND, Settings
from hpctrain.mpi.collectives.network import OverNetwork
from hpctrain.mpi.collectives.node import OverNode, OverNodes
from hpctrain.mpi.errors import CommunicationError
from hpctrain.mpi.library import MPI
from hpctrain.mpi.transfer import peers

OUTBOXES = "memory, but not that of others"
WAYS = {
    "memory": {},
    OUTBOXES: {},
    "mpi": {"shared_memory": False},
    "two levels": {"ranks_per_node": 2},
    "flat over nodes": {"ranks_per_node": 2, "hierarchical": False},
}
SIZES = [0, 1, 1000, 300_001]  # elements
BLOCKS = 4_300_003  # more float32 values than fit one round, and no round number


@pytest.fixture(scope="module", params=list(WAYS))
def way(world, request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == OUTBOXES:
            patch.setattr(peers, "_readv", None)
        group = dist.new_group(backend=BACKEND, pg_options=Settings(**WAYS[request.param]))
        dist.barrier(group=group)
    yield group
    dist.destroy_process_group(group)


def values(rank: int, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, exact in every dtype and order of summation."""
    return (torch.arange(elements) * (rank + 3) % 13 - 4).to(dtype)


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MAX])
def test_all_reduce(world, way, elements: int, dtype: torch.dtype, op) -> None:
    everyone = torch.stack([values(rank, elements, torch.int64) for rank in range(world.size)])
    expected = everyone.sum(0) if op is ReduceOp.SUM else everyone.amax(0)
    for _ in range(3):  # both outboxes, and the first again
        tensor = values(world.rank, elements, dtype)
        dist.all_reduce(tensor, op, group=way)
        assert torch.equal(tensor, expected.to(dtype))


def test_all_reduce_in_blocks(world, way) -> None:
    tensor = values(world.rank, BLOCKS)
    dist.all_reduce(tensor, group=way)
    assert torch.equal(tensor, sum(values(rank, BLOCKS) for rank in range(world.size)))


@pytest.mark.parametrize("elements", [*SIZES, thorough(BLOCKS)])
@pytest.mark.parametrize("aliased", [False, True])
def test_reduce_scatter(world, way, elements: int, aliased: bool) -> None:
    sources = torch.cat([values(world.rank + r, elements) for r in range(world.size)])
    before = sources.clone()
    own = slice(world.rank * elements, (world.rank + 1) * elements)
    output = sources[own] if aliased else torch.empty(elements)
    dist.reduce_scatter_single(output, sources, ReduceOp.AVG, group=way)
    expected = torch.stack([values(rank + world.rank, elements) for rank in range(world.size)]).mean(0)
    torch.testing.assert_close(output, expected)
    before[own] = sources[own]
    assert torch.equal(sources, before)  # inputs for other ranks do not change


@pytest.mark.parametrize("elements", SIZES)
def test_all_gather_broadcast_and_all_to_all(world, way, elements: int) -> None:
    gathered = torch.empty(world.size * elements)
    dist.all_gather_single(gathered, values(world.rank, elements), group=way)
    assert torch.equal(gathered, torch.cat([values(rank, elements) for rank in range(world.size)]))

    listed = [torch.empty(elements) for _ in range(world.size)]
    dist.all_gather(listed, values(world.rank, elements), group=way)
    assert torch.equal(torch.cat(listed), gathered)

    root = world.size - 1
    tensor = values(world.rank, elements)
    dist.broadcast(tensor, root, group=way)
    assert torch.equal(tensor, values(root, elements))

    received = torch.empty(world.size * elements)
    dist.all_to_all_single(
        received, torch.cat([values(10 * world.rank + r, elements) for r in range(world.size)]), group=way
    )
    assert torch.equal(received, torch.cat([values(10 * r + world.rank, elements) for r in range(world.size)]))


@pytest.mark.parametrize("piece", [1, 1000, 300_001])
def test_shared_buffers_are_read_where_they_lie(world, way, piece: int) -> None:
    flat = hpctrain.mpi.shared_zeros(piece * world.size + 64, torch.float32, way)
    assert not flat.any()
    whole = flat[64:]  # any part of the memory will do
    mine = whole[world.rank * piece : (world.rank + 1) * piece]
    everyone = [values(rank, whole.numel()) for rank in range(world.size)]
    total = torch.stack(everyone).sum(0)

    whole.copy_(everyone[world.rank])
    dist.all_reduce(whole, group=way)
    assert torch.equal(whole, total)

    whole.copy_(everyone[world.rank])
    output = torch.empty(piece)
    dist.reduce_scatter_single(output, whole, group=way)
    assert torch.equal(output, total[world.rank * piece : (world.rank + 1) * piece])
    assert torch.equal(whole, everyone[world.rank])

    whole.zero_()
    mine.copy_(output)
    dist.all_gather_single(whole, mine, group=way)
    assert torch.equal(whole, total)


@pytest.mark.thorough
@pytest.mark.shown_on(3)
def test_gathering_in_blocks(world) -> None:
    mine = values(world.rank, 18_000_001, torch.uint8)
    gathered = torch.empty(world.size * len(mine), dtype=torch.uint8)
    dist.all_gather_single(gathered, mine)
    assert all(
        torch.equal(part, values(rank, len(mine), torch.uint8)) for rank, part in enumerate(gathered.chunk(world.size))
    )
    dist.broadcast(mine, world.size - 1)
    assert torch.equal(mine, gathered.chunk(world.size)[-1])
    dist.all_to_all_single(gathered, gathered.clone())
    assert torch.equal(gathered.chunk(world.size)[-1], gathered.chunk(world.size)[0])


def test_gathering_from_a_shared_buffer_on_one_rank_only(world, way) -> None:
    """The shared buffer and the others' ordinary tensors are all read in place."""
    shared = hpctrain.mpi.shared_zeros(100_000 * world.size, torch.float32, way)
    mine = shared[100_000 * world.rank :][:100_000] if world.rank == 0 else torch.empty(100_000)
    output = shared if world.rank == world.size - 1 else torch.empty(len(shared))
    mine.copy_(values(world.rank, 100_000))
    dist.all_gather_single(output, mine, group=way)
    assert torch.equal(output, torch.cat([values(rank, 100_000) for rank in range(world.size)]))


def test_the_memory_of_others_is_read_by_all_or_by_none(world, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = peers.Peers.create(MPI.COMM_WORLD)
    assert theirs is not None, "this system lets processes of one user read each other"
    there, found = values(world.rank, 1000), torch.empty(1000)
    for rank, address in enumerate(MPI.COMM_WORLD.allgather(there.data_ptr())):
        theirs.read(rank, address, found)
        assert torch.equal(found, values(rank, 1000))
    MPI.COMM_WORLD.Barrier()
    with pytest.raises(CommunicationError, match=r"process \d+ of this node ended or left the operation"):
        theirs.read(0, 8, found)  # no memory there

    if world.rank == world.size - 1:
        monkeypatch.setattr(peers, "_readv", None)
    assert peers.Peers.create(MPI.COMM_WORLD) is None


def test_a_shared_buffer_on_one_rank_only(world, way) -> None:
    shared = hpctrain.mpi.shared_zeros(200_000, torch.float32, way)
    tensor = (shared if world.rank == 0 else torch.zeros(200_000)).fill_(world.rank + 1)
    dist.all_reduce(tensor, group=way)
    assert torch.equal(tensor, torch.full((200_000,), float(sum(range(1, world.size + 1)))))


def test_different_parts_of_a_shared_buffer(world, way) -> None:
    shared = hpctrain.mpi.shared_zeros(400_000, torch.float32, way)
    tensor = shared[100_000 * (world.rank % 2) :][:200_000].fill_(world.rank + 1)
    dist.all_reduce(tensor, group=way)
    assert torch.equal(tensor, torch.full((200_000,), float(sum(range(1, world.size + 1)))))


def test_the_order_of_summation_is_the_rank_order(world, way) -> None:
    """A small message and a part of a large one have the same bits, on every rank."""
    torch.manual_seed(world.rank)
    large = torch.randn(400_000)
    small = large[1000:1010].clone()
    dist.all_reduce(large, group=way)
    everyone = [torch.empty_like(large) for _ in range(world.size)]
    dist.all_gather(everyone, large, group=way)
    assert all(torch.equal(other, large) for other in everyone)
    dist.all_reduce(small, group=way)
    # over nodes, small messages take one level and large ones two, with another order of summation
    torch.testing.assert_close(small, large[1000:1010], rtol=1e-5, atol=1e-6)


def test_ranks_per_node_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="found ranks_per_node = 0, expected at least 1"):
        Settings(ranks_per_node=0)


def test_options_of_another_kind_are_refused(world) -> None:
    with pytest.raises(TypeError, match=r"found pg_options of <class 'dict'>, expected hpctrain\.mpi\.Settings"):
        dist.new_group(backend=BACKEND, pg_options={"shared_memory": False})


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "way"),
    [({}, {2: OverNode, 4: OverNodes}), ({"shared_memory": False}, {}), ({"hierarchical": False}, {2: OverNode})],
    ids=str,
)
def test_the_job_s_communicator_says_which_way(
    world, options: dict[str, bool], way: dict[int, type[OverNetwork]]
) -> None:
    """The effect of the communicator's options, with two ranks per node."""
    communicator = check(RawJob(job(communicator={"name": "mpi", **options}), {}, "job.toml"), None).parts.communicator
    assert communicator.backend() == f"cpu:{BACKEND}"
    group = dist.new_group(backend=BACKEND, pg_options=replace(communicator.backend_options(), ranks_per_node=2))
    assert type(group._collectives) is way.get(world.size, OverNetwork)  # type: ignore[attr-defined]
    tensor = values(world.rank, 1000)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, sum(values(rank, 1000) for rank in range(world.size)))
    dist.destroy_process_group(group)
