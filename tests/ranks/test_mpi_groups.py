"""Subgroups, device meshes, the rendezvous for other backends, and destruction."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hpctrain.mpi
from hpctrain.base.store.network import reachable_addresses
from hpctrain.mpi.library import MPI


def total(group: dist.ProcessGroup) -> float:
    tensor = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def test_backend_and_names(world):
    assert dist.get_backend() == hpctrain.mpi.BACKEND
    assert dist.group.WORLD.name() == hpctrain.mpi.BACKEND
    assert dist.get_world_size() == world.size and dist.get_rank() == world.rank
    assert dist.distributed_c10d._resolve_process_group(dist.group.WORLD.group_name) is dist.group.WORLD


def test_an_error_of_mpi_is_an_exception(world):
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        with pytest.raises(MPI.Exception):
            comm.Send(b"x", comm.size)


@pytest.mark.ranks(2)
def test_overlapping_subgroups(world):
    groups = [(ranks, dist.new_group(ranks)) for ranks in ([0, 1], [0, world.size - 1], list(range(1, world.size)))]
    for ranks, group in groups:
        if world.rank in ranks:
            assert total(group) == sum(ranks)
            assert dist.get_group_rank(group, ranks[-1]) == len(set(ranks)) - 1
    for ranks, group in groups:
        if world.rank in ranks:
            dist.destroy_process_group(group)


@pytest.mark.ranks(3)
def test_roots_and_peers_of_a_subgroup_are_global_ranks(world):
    ranks = [0, 2]
    group = dist.new_group(ranks)
    if world.rank in ranks:
        tensor = torch.tensor([float(world.rank)])
        dist.broadcast(tensor, 2, group=group)
        assert tensor.item() == 2
        if world.rank == 2:
            dist.send(torch.tensor([5.0]), 0, group=group)
        else:
            assert dist.recv(tensor, None, group=group) == 2
            assert tensor.item() == 5
        dist.destroy_process_group(group)
    dist.barrier()


def test_members_alone_make_a_group(world):
    mine = [rank for rank in range(world.size) if rank % 2 == world.rank % 2]
    group = dist.new_group(mine, use_local_synchronization=True)
    assert total(group) == sum(mine)


@pytest.mark.ranks(2)
def test_a_group_that_is_made_again_waits_for_its_members_again(world):
    """torch 2.13 gives the new group the old name, and so the old keys in the store. Since 2.14 a rank names groups after its
    number of attempts, so here every rank makes equally many."""
    mine = [0, 1] if world.rank < 2 else list(range(2, world.size))

    def make_and_use() -> None:
        group = dist.new_group(mine, use_local_synchronization=True)
        assert total(group) == sum(mine)
        dist.destroy_process_group(group)

    make_and_use()
    for one, other in ((0, 1), (1, 0)):
        dist.barrier()
        if world.rank == one:
            with pytest.raises(hpctrain.mpi.CommunicationTimeoutError, match=f"rank {other} did not create it"):
                dist.new_group(mine, timeout=timedelta(seconds=0.5), use_local_synchronization=True)
    dist.barrier()
    if world.rank > 1:
        make_and_use()
    make_and_use()


def test_subgroups_by_size(world):
    if world.size % 2 == 0:
        group, _ = dist.new_subgroups(2)
        assert total(group) == world.rank // 2 * 4 + 1


def test_groups_do_not_wait_for_each_other(world):
    """Each group has its own order: ranks may enter two groups' operations in opposite orders."""
    one, two = dist.new_group(), dist.new_group()
    first, second = (one, two) if world.rank % 2 else (two, one)
    works = [dist.all_reduce(torch.ones(100_000), group=group, async_op=True) for group in (first, second)]
    for work in works:
        work.wait()
    assert all(work.is_success() for work in works)


@pytest.mark.ranks(4)
def test_device_mesh(world):
    mesh = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("dp", "tp"))
    width = world.size // 2
    row = [world.rank // width * width + column for column in range(width)]
    assert total(mesh["tp"].get_group()) == sum(row)
    column = [world.rank % width + line * width for line in range(2)]
    assert total(mesh["dp"].get_group()) == sum(column)
    assert total(mesh["dp", "tp"]._flatten().get_group()) == sum(range(2 * width))


def test_a_group_of_another_backend(world):
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=world.gloo)
    assert torch.equal(tensor, torch.full((3,), float(world.size)))


def test_a_destroyed_group_is_refused(world):
    group = dist.new_group()
    assert total(group) == sum(range(world.size))
    handle = group.allreduce
    dist.destroy_process_group(group)
    with pytest.raises(hpctrain.mpi.CommunicationError, match="was destroyed"):
        handle([torch.ones(1)])


def test_many_groups_can_come_and_go(world):
    for _ in range(40):  # an MPI has a limited number of communicators at a time
        group = dist.new_group()
        dist.barrier(group=group)
        dist.destroy_process_group(group)


def test_addresses_are_reachable_ones():
    addresses = reachable_addresses()
    assert not any(address.startswith("127.") or address == "::1" for address in addresses)
    assert len(addresses) == len(set(addresses))
