"""Collectives that move data: every dtype, contiguous or not, aliased or not, compared with gloo or arithmetic."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import hpctrain.mpi
from hpctrain.ranks.restricted_pickle import allow_objects, restrict_objects

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.uint16,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
]
ELEMENTS = [0, 1, 5, 70_001]


def mark(rank: int, elements: int, dtype: torch.dtype) -> Tensor:
    """A tensor with different values for each rank and element."""
    numbers = (torch.arange(elements) * 7 + rank * 3) % 11
    return numbers.to(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    # Not every dtype has an equality of its own; bytes always do.
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathering_and_broadcast(world, dtype):
    for elements in ELEMENTS:
        parts = [mark(rank, elements, dtype) for rank in range(world.size)]
        mine = parts[world.rank]
        outputs = [torch.zeros(elements).to(dtype) for _ in parts]
        dist.all_gather(outputs, mine)
        assert all(same(got, want) for got, want in zip(outputs, parts, strict=True))
        whole = torch.zeros(elements * world.size).to(dtype)
        dist.all_gather_single(whole, mine)
        assert same(whole, torch.cat(parts))
        for root in {0, world.size - 1}:
            tensor = mine.clone()
            dist.broadcast(tensor, root)
            assert same(tensor, parts[root])
            outputs = [torch.zeros(elements).to(dtype) for _ in parts] if world.rank == root else None
            dist.gather(mine, outputs, root)
            assert outputs is None or all(same(got, want) for got, want in zip(outputs, parts, strict=True))
            tensor = torch.zeros(elements).to(dtype)
            dist.scatter(tensor, parts if world.rank == root else None, root)
            assert same(tensor, mine)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_to_all(world, dtype):
    for elements in ELEMENTS:
        outputs = [torch.zeros(elements).to(dtype) for _ in range(world.size)]
        inputs = [mark(10 * world.rank + peer, elements, dtype) for peer in range(world.size)]
        dist.all_to_all(outputs, inputs)
        wants = [mark(10 * peer + world.rank, elements, dtype) for peer in range(world.size)]
        assert all(same(got, want) for got, want in zip(outputs, wants, strict=True))
        output = torch.zeros(elements * world.size).to(dtype)
        dist.all_to_all_single(output, torch.cat(inputs))
        assert same(output, torch.cat(wants))


@settings(max_examples=25, derandomize=True, database=None)
@given(data=st.data())
def test_uneven_all_to_all_equals_gloo(world, data):
    matrix = data.draw(
        st.lists(
            st.lists(st.integers(0, 6), min_size=world.size, max_size=world.size),
            min_size=world.size,
            max_size=world.size,
        )
    )
    width = data.draw(st.integers(1, 3))
    sends, receives = matrix[world.rank], [row[world.rank] for row in matrix]
    tensor = torch.arange(sum(sends) * width).view(-1, width) + 1000 * world.rank
    outputs = []
    for group in (None, world.gloo):
        output = torch.full((sum(receives), width), -1)
        dist.all_to_all_single(output, tensor, receives, sends, group=group)
        outputs.append(output)
    assert torch.equal(*outputs)


@settings(max_examples=15, derandomize=True, database=None)
@given(data=st.data(), factor=st.sampled_from([1, 10_000]))
def test_all_gather_of_unequal_tensors(world, data, factor):
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=world.size, max_size=world.size))
    parts = [torch.full((length * factor,), rank) for rank, length in enumerate(lengths)]
    outputs = [torch.full_like(part, -1) for part in parts]
    dist.all_gather(outputs, parts[world.rank])
    assert all(torch.equal(got, want) for got, want in zip(outputs, parts, strict=True))


def test_in_place_gather_as_fully_sharded_parameters_do_it(world):
    for elements in (3, 100_000):
        whole = torch.full((world.size * elements,), -1.0)
        mine = whole[world.rank * elements : (world.rank + 1) * elements]
        mine.fill_(world.rank)
        dist.all_gather_single(whole, mine)
        assert torch.equal(whole, torch.arange(float(world.size)).repeat_interleave(elements))


def test_input_that_overlaps_the_output(world):
    for elements in (3, 100_000):
        # Another rank's slice, and a slice across two.
        for offset in (((world.rank + 1) % world.size) * elements, elements // 2):
            whole = torch.arange(float(world.size * elements)) + 0.5 * world.rank
            if offset + elements > whole.numel():
                continue  # a single rank has no second slice
            mine = whole[offset : offset + elements]
            gathered = [torch.empty(elements) for _ in range(world.size)]
            dist.all_gather(gathered, mine.clone(), group=world.gloo)
            dist.all_gather_single(whole, mine)
            assert torch.equal(whole, torch.cat(gathered))


def test_reduce_scatter_into_its_own_input(world):
    for elements in (3, 50_000):
        for place in (world.rank, (world.rank + 1) % world.size):
            tensor = torch.arange(float(world.size * elements)) * (world.rank + 1)
            want = torch.arange(float(world.size * elements)).chunk(world.size)[world.rank] * sum(range(world.size + 1))
            output = tensor[place * elements : (place + 1) * elements]
            dist.reduce_scatter_single(output, tensor)
            assert torch.equal(output, want)


def test_all_to_all_in_place(world):
    tensor = torch.arange(world.size * 2) + 100 * world.rank
    want = torch.cat([torch.arange(2) + 2 * world.rank + 100 * peer for peer in range(world.size)])
    dist.all_to_all_single(tensor, tensor)
    assert torch.equal(tensor, want)


def test_expanded_tensors_are_sent(world):
    expanded, whole = torch.full((1,), float(world.rank)).expand(6), torch.empty(6 * world.size)
    dist.all_gather_single(whole, expanded)
    assert torch.equal(whole, torch.arange(world.size).repeat_interleave(6).float())
    received = expanded if world.rank == 0 else torch.empty(6)
    dist.broadcast(received, 0)
    assert torch.equal(received, torch.zeros(6))


def test_noncontiguous_everywhere(world):
    def column(rank: int) -> Tensor:
        return (torch.arange(12.0) + rank).view(3, 4).T[1]

    assert not column(0).is_contiguous()
    grid = torch.zeros(3, world.size)
    outputs = list(grid.unbind(1))
    dist.all_gather(outputs, column(world.rank))
    assert torch.equal(grid, torch.stack([column(rank) for rank in range(world.size)], 1))
    grid = torch.zeros(3, 2)
    grid[:, 0] = column(world.rank)
    dist.broadcast(grid[:, 0], 0)
    assert torch.equal(grid, torch.stack([column(0), torch.zeros(3)], 1))
    whole = torch.zeros(2, 3 * world.size).T[:, 0]
    dist.all_gather_single(whole, column(world.rank))
    assert torch.equal(whole, torch.cat([column(rank) for rank in range(world.size)]))
    part = torch.zeros(2, 3).T[:, 1]
    dist.reduce_scatter_single(part, torch.cat([column(rank) for rank in range(world.size)]))
    assert torch.equal(part, column(world.rank) * world.size)


def test_conjugated_and_scalar_tensors(world):
    conjugated = (torch.ones(4, dtype=torch.complex64) * (1 + 2j)).conj()
    gathered = [torch.zeros(4, dtype=torch.complex64) for _ in range(world.size)]
    dist.group.WORLD.allgather([gathered], [conjugated]).wait()
    assert all(torch.equal(part, torch.full((4,), 1 - 2j)) for part in gathered)
    scalar = torch.tensor(float(world.rank))
    dist.all_reduce(scalar)
    assert scalar.shape == () and scalar.item() == sum(range(world.size))


def test_objects(world):
    allow_objects()  # a program without a job may send what it likes
    gathered: list[object] = [None] * world.size
    dist.all_gather_object(gathered, {"rank": world.rank, "padding": "x" * 1000 * world.rank})
    assert [entry["rank"] for entry in gathered] == list(range(world.size))
    sent = [("from", 0), torch.arange(3)] if world.rank == 0 else [None, None]
    dist.broadcast_object_list(sent, 0)
    assert sent[0] == ("from", 0) and torch.equal(sent[1], torch.arange(3))
    received: list[object] = [None]
    dist.scatter_object_list(received, [f"for {rank}" for rank in range(world.size)] if world.rank == 0 else None, 0)
    assert received == [f"for {world.rank}"]
    collected = [None] * world.size if world.rank == 0 else None
    dist.gather_object(world.rank, collected, 0)
    assert collected in (None, list(range(world.size)))
    restrict_objects()


def test_operations_finish_in_the_order_they_were_submitted(world):
    tensors = [torch.full((size,), float(i)) for i, size in enumerate([1_000_000, 1, 50_000, 3, 400_000] * 4)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.all_reduce(torch.ones(1))  # synchronous, behind all of them
    assert all(work.is_completed() for work in works)
    for i, tensor in enumerate(tensors):
        assert torch.equal(tensor, torch.full_like(tensor, float(i * world.size)))


@pytest.mark.ranks(2)
def test_computation_goes_on_while_an_operation_runs(world):
    if world.rank == 0:
        work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
        assert not work.is_completed()  # the others have not started
        dist.barrier(group=world.gloo)
    else:
        dist.barrier(group=world.gloo)
        work = dist.all_reduce(torch.ones(1_000_000), async_op=True)
    work.wait()
    assert work.is_success()


def test_future_and_a_callback_that_communicates(world):
    def then(future: torch.futures.Future) -> Tensor:
        tensor = future.value()[0]
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    for elements in (3, 300_000):
        tensor = torch.ones(elements)
        future = dist.all_reduce(tensor, async_op=True).get_future().then(then)
        assert torch.equal(future.wait(), torch.full((elements,), float(world.size**2)))


def test_functional_collectives_and_their_unwaited_outputs(world):
    import torch.distributed._functional_collectives as functional

    pending = functional.all_reduce(torch.ones(100_000), "sum", dist.group.WORLD)
    # Given to the next operation without waiting for it.
    again = functional.all_gather_single(pending, 0, dist.group.WORLD)
    dist.all_reduce(pending)
    assert torch.equal(again.sum(), torch.tensor(100_000.0 * world.size**2))
    assert torch.equal(pending + 0, torch.full((100_000,), float(world.size**2)))


def test_statistics_count_bytes_and_blocked_time(world):
    before = hpctrain.mpi.statistics()
    dist.all_reduce(torch.ones(1000))
    dist.broadcast(torch.ones(10, dtype=torch.float64), 0)
    after = hpctrain.mpi.statistics()
    reduced = after.operations["all_reduce"], before.operations.get("all_reduce", hpctrain.mpi.OperationStatistics())
    assert reduced[0].bytes - reduced[1].bytes == 4000 and reduced[0].calls - reduced[1].calls == 1
    assert after.total.bytes - before.total.bytes == 4080
    assert after.total.blocked_seconds > before.total.blocked_seconds and after.total.seconds > before.total.seconds


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("elements", [5, 200_000])
def test_tensors_of_inference_mode_before_and_after_others(world, elements, asynchronous):
    """Cached buffers must work for both kinds of tensors, in any thread."""
    group = dist.new_group()
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            tensor, total, gathered = torch.ones(elements), torch.zeros(1), torch.zeros(elements * world.size)
            strided = torch.zeros(3, 2)[:, 0]
            works = [
                dist.all_reduce(tensor, group=group, async_op=asynchronous),
                dist.reduce(total, 0, group=group, async_op=asynchronous),
                dist.all_gather_single(gathered, tensor, group=group, async_op=asynchronous),
            ]
            if world.size > 1:
                works.append(dist.isend(torch.ones(3), (world.rank + 1) % world.size, group))
                works.append(dist.irecv(strided, (world.rank - 1) % world.size, group))
            for work in filter(None, works):
                work.wait()
            assert (gathered == world.size).all() and (world.size == 1 or strided.sum() == 3)
    dist.destroy_process_group(group)


def test_modes_of_the_caller_see_the_same_whichever_thread_runs_an_operation(world):
    """Selective checkpointing replays the operators it saw; the thread of an operation depends on timing."""

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen[-1].append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[list[str]] = []
    mine, received = torch.full((world.size,), float(world.rank)), torch.empty(world.size)
    everyones = torch.empty(world.size * world.size)
    for asynchronous in (False, True):
        seen.append([])
        with Seen():
            for work in (
                dist.all_gather_into_tensor(everyones, mine, async_op=asynchronous),
                dist.all_to_all_single(received, mine, async_op=asynchronous),
            ):
                if work is not None:
                    time.sleep(0.05)  # the worker takes it
                    work.wait()
        assert received.tolist() == [float(rank) for rank in range(world.size)]
    assert seen[0] == seen[1]


def test_tensors_that_require_gradients(world):
    for elements in (3, 100_000):
        parameter = torch.ones(elements, requires_grad=True)
        dist.all_reduce(parameter)
        assert torch.equal(parameter.detach(), torch.full((elements,), float(world.size)))
        gathered = [torch.zeros(elements) for _ in range(world.size)]
        dist.all_gather(gathered, parameter * 2)
        assert torch.equal(gathered[-1], torch.full((elements,), 2.0 * world.size))
        strided = torch.zeros(elements, 2, requires_grad=True)
        dist.broadcast(strided[:, 1] + float(world.rank), 0)


def test_misuse_is_told_to_the_caller(world):
    size = world.size
    with pytest.raises(ValueError, match=f"found an output of 1 elements .* expected {3 * size}"):
        dist.all_gather_single(torch.zeros(1), torch.zeros(3))
    with pytest.raises(ValueError, match=r"torch\.float32 and torch\.int64"):
        dist.all_gather_single(torch.zeros(3 * size), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="found an input of 7 elements"):
        dist.reduce_scatter_single(torch.zeros(100), torch.zeros(7))
    with pytest.raises(ValueError, match=f"found {size + 1} outputs, expected {size}"):
        dist.all_gather([torch.zeros(2)] * (size + 1), torch.zeros(2))
    with pytest.raises(ValueError, match="input_split_sizes"):
        dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [4] + [0] * (size - 1), [9] * size)
    with pytest.raises(ValueError, match=r"output for this rank of 3 elements .* expected 2"):
        dist.all_to_all_single(torch.zeros(size, 3), torch.zeros(size, 2))
    with pytest.raises(ValueError, match=r"output for this rank of 3 elements .* expected 2"):
        dist.all_to_all([torch.zeros(3)] * size, [torch.zeros(2)] * size)
    with pytest.raises(ValueError, match="on meta"):
        dist.all_reduce(torch.zeros(3, device="meta"))
    if size > 1:
        with pytest.raises(ValueError, match="found tag -1"):
            dist.send(torch.zeros(1), (world.rank + 1) % size, tag=-1)
    dist.barrier()  # the ranks are still in step
