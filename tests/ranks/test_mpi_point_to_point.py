"""Sends and receives: matching, orders that would block a naive implementation, and pipelines of many messages."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

import hpctrain.mpi

pytestmark = pytest.mark.ranks(2)
SIZES = [0, 1, 1000, 300_000]  # elements: eager and rendezvous messages of MPI


def neighbours(world) -> tuple[int, int]:
    return (world.rank + 1) % world.size, (world.rank - 1) % world.size


@pytest.mark.parametrize("elements", SIZES)
def test_everybody_sends_before_receiving(world, elements):
    right, left = neighbours(world)
    received = torch.full((elements,), -1.0)
    sending = dist.isend(torch.full((elements,), float(world.rank)), right)
    receiving = dist.irecv(received, left)
    receiving.wait()
    sending.wait()
    assert torch.equal(received, torch.full((elements,), float(left)))
    assert sending.is_success() and receiving.is_success()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.uint32])
def test_any_dtype(world, dtype):
    right, left = neighbours(world)
    sent = (torch.arange(100) % 3).to(dtype)
    received = torch.zeros(100, dtype=torch.int32).to(dtype)
    for work in [dist.irecv(received, left), dist.isend(sent, right)]:
        work.wait()
    assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))


@pytest.mark.parametrize("elements", SIZES)
def test_batch_in_any_order(world, elements):
    right, left = neighbours(world)
    received = [torch.full((elements,), -1.0) for _ in range(2)]
    operations = [
        dist.P2POp(dist.isend, torch.full((elements,), 10.0 * world.rank), right),
        dist.P2POp(dist.irecv, received[0], left),
        dist.P2POp(dist.isend, torch.full((elements,), 10.0 * world.rank + 1), right),
        dist.P2POp(dist.irecv, received[1], left),
    ]
    if world.rank % 2:
        operations = [operations[i] for i in (1, 3, 0, 2)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    for number, tensor in enumerate(received):
        assert torch.equal(tensor, torch.full((elements,), 10.0 * left + number))


def test_tags_choose_and_equal_tags_keep_their_order(world):
    right, left = neighbours(world)
    works = [dist.isend(torch.tensor([tag * 10 + number]), right, tag=tag) for number in range(3) for tag in (1, 2)]
    for tag in (2, 1):
        for number in range(3):
            received = torch.tensor([-1])
            dist.recv(received, left, tag=tag)
            assert received.item() == tag * 10 + number
    for work in works:
        work.wait()


def test_receive_from_any_source(world):
    if world.rank == 0:
        sources = []
        for _ in range(2 * (world.size - 1)):
            received = torch.tensor([-1, -1])
            source = dist.recv(received)
            assert received[0] == source
            sources.append((source, received[1].item()))
        assert sorted(sources) == [(rank, number) for rank in range(1, world.size) for number in range(2)]
        for rank in range(1, world.size):  # messages of one sender arrive in order
            assert [number for source, number in sources if source == rank] == [0, 1]
    else:
        for number in range(2):
            dist.send(torch.tensor([world.rank, number]), 0)


def test_noncontiguous(world):
    right, left = neighbours(world)
    grid = torch.zeros(5, 4)
    receiving = dist.irecv(grid[:, 2], left)
    dist.send((torch.arange(10.0) + world.rank).view(5, 2)[:, 1], right)
    receiving.wait()
    assert torch.equal(grid[:, 2], torch.arange(1.0, 10.0, 2) + left)
    assert grid[:, [0, 1, 3]].count_nonzero() == 0


def test_many_outstanding_between_collectives(world):
    """A pipeline's traffic: messages of all sizes in both directions while collectives run."""
    right, left = neighbours(world)
    generator = torch.Generator().manual_seed(5)
    sizes = torch.randint(1, 40_000, (120,), generator=generator).tolist()
    received = [torch.full((size,), -1.0) for size in sizes]
    backwards = [torch.full((size,), -1.0) for size in sizes]
    works = []
    for number, size in enumerate(sizes):
        works.append(dist.isend(torch.full((size,), float(number + world.rank)), right, tag=1))
        works.append(dist.irecv(received[number], left, tag=1))
        works.append(dist.irecv(backwards[number], right, tag=2))
        works.append(dist.isend(torch.full((size,), float(number - world.rank)), left, tag=2))
        if number % 20 == 0:
            works.append(dist.all_reduce(torch.ones(100_000), async_op=True))
            dist.all_reduce(torch.ones(1))
    for work in reversed(works):
        work.wait()
    for number, size in enumerate(sizes):
        assert torch.equal(received[number], torch.full((size,), float(number + left)))
        assert torch.equal(backwards[number], torch.full((size,), float(number - right)))


def test_a_message_arrives_while_nobody_waits_for_it(world):
    """The sender computes; without a thread that drives MPI, a large message would make no progress."""
    if world.rank == 0:
        work = dist.isend(torch.arange(2_000_000.0), 1)
        dist.barrier(group=world.gloo)  # no MPI call here
        work.wait()
    elif world.rank == 1:
        received = torch.zeros(2_000_000)
        dist.recv(received, 0)
        assert torch.equal(received, torch.arange(2_000_000.0))
        dist.barrier(group=world.gloo)
    else:
        dist.barrier(group=world.gloo)


def test_from_several_threads(world):
    right, left = neighbours(world)
    results: dict[int, torch.Tensor] = {}

    def talk(tag: int) -> None:
        for number in range(20):
            received = torch.zeros(5000)
            works = [
                dist.isend(torch.full((5000,), float(tag + number)), right, tag=tag),
                dist.irecv(received, left, tag=tag),
            ]
            for work in works:
                work.wait()
            results[tag * 100 + number] = received

    threads = [threading.Thread(target=talk, args=(tag,)) for tag in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 60
    for key, tensor in results.items():
        assert torch.equal(tensor, torch.full((5000,), float(key // 100 + key % 100)))


def test_a_receive_of_the_wrong_size_says_so(world):
    right, left = neighbours(world)
    sending = dist.isend(torch.ones(3), right)
    with pytest.raises(hpctrain.mpi.CommunicationError, match=f"recv from rank {left} .* got 12 bytes, expected 20"):
        dist.recv(torch.zeros(5), left)
    sending.wait()


def test_a_receive_into_elements_that_share_memory_says_so_and_the_group_goes_on(world):
    if world.rank == 0:
        dist.send(torch.ones(6), 1)
        dist.send(torch.full((2,), 7.0), 1)
    elif world.rank == 1:
        work = dist.irecv(torch.zeros(1).expand(6), 0)
        with pytest.raises(hpctrain.mpi.CommunicationError, match=r"can't be written: .*more than one element"):
            work.wait()
        after = torch.zeros(2)
        dist.recv(after, 0)
        assert after.tolist() == [7.0, 7.0]


def test_object_lists(world):
    if world.rank == 0:
        dist.send_object_list([{"a": 1}, "text"], 1)
    elif world.rank == 1:
        received = [None, None]
        dist.recv_object_list(received, 0)
        assert received == [{"a": 1}, "text"]
