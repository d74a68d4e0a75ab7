"""hpctrain_horovod.torch: what a Horovod script relies on, compared with the plain arithmetic."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import hpctrain_horovod.torch as hvd
import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("world")

REDUCED = [torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
MOVED = [torch.uint8, torch.int8, torch.int16, *REDUCED]


@pytest.fixture(scope="module", autouse=True)
def horovod() -> Iterator[None]:
    hvd.init(process_sets="dynamic")
    yield
    hvd.shutdown()


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, which every dtype can add exactly."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(7 + rank)).to(dtype)


def of_all(*shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [of_rank(rank, *shape, dtype=dtype) for rank in range(hvd.size())]


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
@pytest.mark.parametrize("shape", [(), (17,), (5, 3, 2), (0, 4)], ids=str)
def test_allreduce(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    mine, everyone = of_rank(hvd.rank(), *shape, dtype=dtype), torch.stack(of_all(*shape, dtype=dtype))
    before = mine.clone()
    total = everyone.double().sum(0)
    average = total / hvd.size()
    expected = average if dtype.is_floating_point else average.trunc()
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), total.to(dtype))
    torch.testing.assert_close(
        hvd.allreduce(mine), expected.to(dtype), rtol=1e-2 if dtype.itemsize < 4 else 1e-6, atol=0
    )
    assert torch.equal(hvd.allreduce(mine, op=hvd.Min), everyone.amin(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Max), everyone.amax(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Product), everyone.double().prod(0).to(dtype))
    assert torch.equal(mine, before), "the input stays"
    assert torch.equal(hvd.allreduce(mine, average=False), total.to(dtype))
    assert hvd.allreduce_(mine, op=hvd.Sum) is mine and torch.equal(mine, total.to(dtype))


def test_integers_are_scaled_towards_zero() -> None:
    size = hvd.size()
    assert hvd.allreduce(torch.tensor([-3 if hvd.rank() == 0 else 0])).item() == int(-3 / size)
    assert hvd.allreduce(torch.tensor([3]), op=hvd.Sum, prescale_factor=0.5).item() == size
    assert hvd.allreduce(torch.tensor([3]), op=hvd.Sum, postscale_factor=0.5).item() == int(3 * size * 0.5)
    assert hvd.allreduce(torch.tensor([-7]), op=hvd.Min, prescale_factor=0.5).item() == -3


def test_a_scale_may_be_a_tensor_that_changes() -> None:
    scale = torch.tensor(2.0)
    for _ in range(2):
        assert hvd.allreduce(torch.tensor([3.0]), op=hvd.Max, prescale_factor=scale, name="scaled").item() == 3 * scale
        scale.mul_(2)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product])
def test_scales_go_with_every_reduction(op: int) -> None:
    mine = of_rank(hvd.rank(), 9, dtype=torch.float64)
    expected = hvd.allreduce(mine * 0.5, op=op) * 3
    torch.testing.assert_close(hvd.allreduce(mine, op=op, prescale_factor=0.5, postscale_factor=3.0), expected)


def test_ranks_submit_in_any_order_and_from_any_thread() -> None:
    """Matched by name; a broadcast of the same name is another operation."""
    count, rank = 60, hvd.rank()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(rank)).tolist()
    handles: dict[int, int] = {}

    def submit(places: list[int]) -> None:
        for place in places:
            handles[place] = hvd.allreduce_async(
                torch.full((place % 7 + 1,), place + rank), op=hvd.Sum, name=f"t{place}"
            )

    threads = [threading.Thread(target=submit, args=(order[begin::3],)) for begin in range(3)]
    for thread in threads:
        thread.start()
    root = hvd.size() - 1
    same_name = hvd.broadcast_async(torch.tensor([rank]), root, name="t3")
    for thread in threads:
        thread.join()
    ranks = sum(range(hvd.size()))
    for place in reversed(range(count)):
        assert hvd.synchronize(handles[place]).tolist() == [place * hvd.size() + ranks] * (place % 7 + 1)
    assert hvd.synchronize(same_name).item() == root


def test_what_was_submitted_together_is_reduced_like_what_was_not() -> None:
    tensors = [torch.randn(31, generator=torch.Generator().manual_seed(hvd.rank() * 100 + n)) for n in range(20)]
    handles = [hvd.allreduce_async(tensor, name=f"fused{n}") for n, tensor in enumerate(tensors)]
    together = [hvd.synchronize(handle) for handle in handles]
    assert all(torch.equal(hvd.allreduce(tensor), found) for tensor, found in zip(tensors, together, strict=True))


def test_handles() -> None:
    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    while not hvd.poll(handle):
        time.sleep(0.001)
    assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match="handle"):
        hvd.poll(handle)


def test_groups() -> None:
    size = hvd.size()
    tensors = [torch.ones(2), torch.ones(3, dtype=torch.int64), torch.ones(1, dtype=torch.float16)]
    found = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    assert isinstance(found, list) and [one.dtype for one in found] == [one.dtype for one in tensors]
    assert [one.tolist() for one in found] == [[size] * len(one) for one in tensors]
    assert isinstance(hvd.synchronize(hvd.grouped_allreduce_async(tensors, name="g")), tuple)
    copies = [one.clone() for one in tensors]
    placed = hvd.grouped_allreduce_(copies, op=hvd.Sum)
    assert isinstance(placed, tuple) and all(one is other for one, other in zip(placed, copies, strict=True))
    gathered = hvd.grouped_allgather([torch.full((hvd.rank() + 1,), 1), torch.zeros(1, 2)])
    assert isinstance(gathered, tuple) and [len(one) for one in gathered] == [size * (size + 1) // 2, size]
    scattered = hvd.grouped_reducescatter([torch.ones(size, 2), torch.ones(2 * size)], op=hvd.Sum)
    assert isinstance(scattered, list) and [one.flatten().tolist() for one in scattered] == [[size] * 2] * 2
    for empty in (hvd.grouped_allreduce, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with pytest.raises(ValueError, match="no tensors"):
            empty([])


@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_allgather_broadcast_alltoall(dtype: torch.dtype) -> None:
    rank, size = hvd.rank(), hvd.size()
    parts = [of_rank(r, r * 2 % 3, 2, dtype=dtype) for r in range(size)]
    assert torch.equal(hvd.allgather(parts[rank]), torch.cat(parts))
    root = size - 1
    assert torch.equal(hvd.broadcast(of_rank(rank, 4, dtype=dtype), root), of_rank(root, 4, dtype=dtype))
    mine = of_rank(rank, 4, dtype=dtype)
    assert hvd.broadcast_(mine, root) is mine and torch.equal(mine, of_rank(root, 4, dtype=dtype))
    rows = [of_rank(r, size, 3, dtype=dtype) for r in range(size)]
    expected = torch.stack([rows[r][rank] for r in range(size)])
    assert torch.equal(hvd.alltoall(rows[rank]), expected)
    found, received = hvd.synchronize(hvd.alltoall_async(rows[rank]))
    assert torch.equal(found, expected) and received.tolist() == [1] * size and received.dtype == torch.int32


def test_alltoall_with_splits() -> None:
    rank, size = hvd.rank(), hvd.size()
    sent = [torch.repeat_interleave(torch.arange(size), torch.arange(size) + r) + 10 * r for r in range(size)]
    splits = torch.arange(size, dtype=torch.int32) + rank
    found, received = hvd.alltoall(sent[rank], splits)
    assert received.tolist() == [rank + r for r in range(size)]
    assert found.tolist() == [value for r in range(size) for value in [rank + 10 * r] * (rank + r)]
    only_to_last = [0] * (size - 1) + [2]
    found, received = hvd.alltoall(torch.tensor([rank, rank]), only_to_last)
    assert found.tolist() == ([r for r in range(size) for _ in range(2)] if rank == size - 1 else [])
    for wrong in ([1] * (size + 1), [size + 5] * size, [-1] + [2] * (size - 1), torch.ones(size)):
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(torch.zeros(size + 4), wrong)


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_reducescatter(rows: int, dtype: torch.dtype) -> None:
    rank, size = hvd.rank(), hvd.size()
    everyone = torch.stack(of_all(rows, 2, dtype=dtype)).double().sum(0)
    counts = [rows // size + (r < rows % size) for r in range(size)]
    expected = everyone.split(counts)[rank]
    assert torch.equal(hvd.reducescatter(of_rank(rank, rows, 2, dtype=dtype), op=hvd.Sum), expected.to(dtype))
    average = expected / size if dtype.is_floating_point else (expected / size).trunc()
    found = hvd.synchronize(hvd.reducescatter_async(of_rank(rank, rows, 2, dtype=dtype)))
    torch.testing.assert_close(found, average.to(dtype), rtol=1e-2, atol=0)
    for op in (hvd.Max, hvd.Adasum):
        with pytest.raises(hvd.HorovodInternalError, match="reducescatter with op="):
            hvd.reducescatter(torch.ones(rows), op=op)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("submit", "sentence"),
    [
        (lambda first: hvd.allreduce(torch.ones(2 + first), name="m"), "Mismatched ALLREDUCE tensor shapes"),
        (lambda first: hvd.allreduce(torch.ones(2).to([torch.float32, torch.int64][first]), name="m"), "data types"),
        (lambda first: hvd.allreduce(torch.ones(2), op=[hvd.Sum, hvd.Min][first], name="m"), "reduction operations"),
        (lambda first: hvd.allreduce(torch.ones(2), prescale_factor=1.0 + first, name="m"), "prescale factors"),
        (lambda first: hvd.allreduce(torch.ones(2), postscale_factor=1.0 + first, name="m"), "postscale factors"),
        (lambda first: hvd.broadcast(torch.ones(2), first, name="m"), "Mismatched BROADCAST root ranks"),
        (lambda first: hvd.allgather(torch.ones(1, 2 + first), name="m"), "Mismatched ALLGATHER tensor shapes"),
        (lambda first: hvd.reducescatter(torch.ones(2 + first), name="m"), "Mismatched REDUCESCATTER tensor shapes"),
        (lambda first: hvd.alltoall(torch.ones(hvd.size(), 2 + first), name="m"), "Mismatched ALLTOALL"),
    ],
)
def test_a_mismatch_is_an_error_on_every_rank_and_the_next_operation_works(submit, sentence: str) -> None:
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match=sentence) as error:
            submit(int(hvd.rank() == hvd.size() - 1))
        assert "rank 0 has" in str(error.value) and f"rank {hvd.size() - 1} has" in str(error.value)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def test_wrong_arguments_are_a_value_error_here_and_take_no_number() -> None:
    wrong = [
        (lambda: hvd.allreduce(torch.ones(2, 3).t()), "contiguous"),
        (lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool)), "torch.bool"),
        (lambda: hvd.allreduce(torch.ones(2, dtype=torch.complex64)), "complex64"),
        (lambda: hvd.allgather(torch.ones(2, dtype=torch.bool)), "torch.bool"),
        (lambda: hvd.broadcast(torch.ones(2), hvd.size()), "root_rank"),
        (lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum), "both op and average"),
        (lambda: hvd.allreduce(torch.ones(2), op=17), "op=17"),
        (lambda: hvd.allreduce(torch.ones(2), process_set=hvd.ProcessSet([0])), "not registered"),
    ]
    for place, (call, word) in enumerate(wrong):
        if (
            place % hvd.size() == hvd.rank()
        ):  # a number taken by one rank only would leave the next operation without a match
            with pytest.raises(ValueError, match=word):
                call()
    with pytest.raises(IndexError):
        hvd.allgather(torch.tensor(1.0))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@pytest.mark.ranks(2)
def test_a_name_in_flight_is_refused() -> None:
    last = hvd.size() - 1
    if hvd.rank() != last:
        first = hvd.allreduce_async(torch.ones(1), name="twice", op=hvd.Sum)
        with pytest.raises(ValueError, match=r"second allreduce.twice"):
            hvd.allreduce_async(torch.ones(1), name="twice", op=hvd.Sum)
    hvd.barrier()
    if hvd.rank() == last:
        first = hvd.allreduce_async(torch.ones(1), name="twice", op=hvd.Sum)
    assert hvd.synchronize(first).item() == hvd.size()


def test_join_gives_zeros_and_the_last_rank() -> None:
    rank, size = hvd.rank(), hvd.size()
    for step in range(rank + 1):
        active = size - step
        assert hvd.allreduce(torch.full((2,), 4.0), name="data").tolist() == pytest.approx([4.0 * active / size] * 2)
        if active < size:
            assert hvd.allreduce(torch.tensor([4.0]), op=hvd.Max).item() == 4.0
            assert hvd.allreduce(torch.tensor([4.0]), op=hvd.Min).item() == 0.0
            assert hvd.allreduce(torch.tensor([4.0]), op=hvd.Product).item() == 0.0
            with pytest.raises(hvd.HorovodInternalError, match="joined"):
                hvd.broadcast(torch.ones(1), rank, name=f"late{step}")
            hvd.barrier()
    time.sleep(0.02 * rank)
    assert hvd.join() == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    assert hvd.broadcast(torch.tensor([rank]), 0).item() == 0


def test_sparse_tensors() -> None:
    rank, size = hvd.rank(), hvd.size()
    made = [torch.sparse_coo_tensor([[0, r + 1, r + 1]], [1.0, 2.0, 3.0], (size + 2,)) for r in range(size)]
    expected = torch.stack([one.to_dense() for one in made]).sum(0)
    result = hvd.sparse_allreduce_async(made[rank], name="sparse", op=hvd.Sum)
    assert torch.equal(result().to_dense(), expected)
    result = hvd.sparse_allreduce_async(made[rank], name="sparse", op=hvd.Average)
    torch.testing.assert_close(result().to_dense(), expected / size)


@pytest.mark.ranks(2)
@pytest.mark.shown_on(2, 4)
def test_adasum() -> None:
    rank, size = hvd.rank(), hvd.size()
    orthogonal = torch.zeros(size)
    orthogonal[rank] = 2.0
    assert hvd.allreduce(orthogonal, op=hvd.Adasum).tolist() == [2.0] * size
    equal = torch.arange(5.0)
    torch.testing.assert_close(hvd.allreduce(equal, op=hvd.Adasum), equal)
    everyone = [torch.randn(6, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(size)]
    level = everyone
    while len(level) > 1:
        level = [
            (1 - a @ b / (2 * a @ a)) * a + (1 - a @ b / (2 * b @ b)) * b
            for a, b in zip(level[::2], level[1::2], strict=True)
        ]
    torch.testing.assert_close(hvd.allreduce(everyone[rank], op=hvd.Adasum), level[0])
    with pytest.raises(ValueError, match="Adasum"):
        hvd.allreduce(torch.ones(1, dtype=torch.int64), op=hvd.Adasum)


@pytest.mark.ranks(3)
@pytest.mark.shown_on(3)
def test_adasum_needs_a_power_of_two() -> None:
    with pytest.raises(NotImplementedError, match="power of two"):
        hvd.allreduce(torch.ones(1), op=hvd.Adasum)


@pytest.mark.ranks(2)
def test_process_sets() -> None:
    rank, size = hvd.rank(), hvd.size()
    first = hvd.add_process_set([0])
    others = hvd.add_process_set(hvd.ProcessSet(range(1, size)))
    assert [first.process_set_id, others.process_set_id] == sorted([first.process_set_id, others.process_set_id])
    mine, its = (first, [0]) if rank == 0 else (others, list(range(1, size)))
    assert mine.included() and mine.size() == len(its) and mine.rank() == its.index(rank) and mine.ranks == its
    other = others if rank == 0 else first
    assert not other.included() and other.size() == size - len(its)
    with pytest.raises(ValueError, match=f"found rank {rank}, expected one of"):
        other.rank()
    assert hvd.ProcessSet([0]).size() is None and hvd.ProcessSet([0]).rank() is None
    with pytest.raises(ValueError, match="process set"):
        hvd.allreduce(torch.ones(1), process_set=other)
    # both sets at once, with one of all ranks in flight
    everyone = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, name="everyone")
    for _ in range(5):
        assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum, process_set=mine).item() == sum(its)
        assert hvd.allgather(torch.tensor([rank]), process_set=mine).tolist() == its
        assert hvd.broadcast(torch.tensor([rank]), its[-1], process_set=mine).item() == its[-1]
    assert hvd.synchronize(everyone).item() == size
    with pytest.raises(ValueError, match="second process set"):
        hvd.add_process_set([0])
    with pytest.raises(ValueError, match=r"expected some of 0"):
        hvd.add_process_set([size])
    assert hvd.remove_process_set(first) and hvd.remove_process_set(others)
    assert not hvd.remove_process_set(first) and not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=mine)
    for _ in range(2):  # what the ranks of a removed set sent last must not end the next one
        again = hvd.add_process_set(range(size - 1))
        if again.included():
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=again).item() == again.size()
        assert hvd.remove_process_set(again)


def test_gradients() -> None:
    rank, size = hvd.rank(), hvd.size()
    weights = torch.arange(3.0) + rank
    total = sum(torch.arange(3.0) + r for r in range(size))

    def gradient(call, given: Tensor, by: Tensor) -> Tensor:
        given.requires_grad_()
        (call(given) * by).sum().backward()
        assert given.grad is not None
        return given.grad

    assert torch.equal(gradient(lambda x: hvd.allreduce(x, op=hvd.Sum), torch.ones(3), weights), total)
    torch.testing.assert_close(gradient(hvd.allreduce, torch.ones(3), weights), total / size)
    first, second = (torch.ones(3, requires_grad=True) for _ in range(2))
    torch.stack(hvd.grouped_allreduce([first, second], op=hvd.Sum)).sum().backward()
    assert first.grad is not None and second.grad is not None
    assert first.grad.tolist() == second.grad.tolist() == [size] * 3
    rows = size * (size + 1) // 2
    by = torch.arange(float(rows)).unsqueeze(1) * (rank + 1)
    expected = torch.arange(float(rows)).unsqueeze(1) * ((size + 1) / 2)
    begin = rank * (rank + 1) // 2
    found = gradient(hvd.allgather, torch.ones(rank + 1, 2), by)
    torch.testing.assert_close(found, expected[begin : begin + rank + 1].expand(-1, 2))
    found = gradient(lambda x: hvd.broadcast(x, 0), torch.ones(3), weights)
    torch.testing.assert_close(found, total / size if rank == 0 else torch.zeros(3))
    found = gradient(hvd.alltoall, torch.ones(size), torch.full((size,), float(rank)))
    assert found.tolist() == [float(r) for r in range(size)]
    splits = torch.arange(size, dtype=torch.int32) + rank
    given = torch.ones(int(splits.sum()), requires_grad=True)
    (hvd.alltoall(given, splits)[0] * (rank + 1)).sum().backward()
    assert given.grad is not None
    assert given.grad.tolist() == [r + 1.0 for r in range(size) for _ in range(r + rank)]
    found = gradient(lambda x: hvd.reducescatter(x, op=hvd.Sum), torch.ones(size, 2), torch.tensor(rank + 1.0))
    torch.testing.assert_close(found, size * torch.arange(1.0, size + 1).unsqueeze(1).expand(-1, 2))


def test_objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.broadcast_object({"from": rank, "list": [1, 2]}, size - 1) == {"from": size - 1, "list": [1, 2]}
    assert hvd.allgather_object(["x"] * rank) == [["x"] * r for r in range(size)]
    assert hvd.allgather_object(None) == [None] * size


def test_compression() -> None:
    tensor = torch.full((3,), 1.0 + hvd.rank())
    found = hvd.allreduce(tensor, compression=hvd.Compression.fp16)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.full((3,), (hvd.size() + 1) / 2))
    # a sum of these overflows float16; their average does not
    assert hvd.allreduce(torch.full((1,), 4e4, dtype=torch.float16)).item() == pytest.approx(4e4, rel=1e-3)


def test_who_this_process_is(world) -> None:
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
    assert (hvd.local_rank(), hvd.local_size()) == (world.rank, world.size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous() and hvd.mpi_enabled() and hvd.mpi_built() and hvd.mpi_threads_supported()


def test_shutdown_and_init_again() -> None:
    for _ in range(3):
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match="initialized"):
            hvd.rank()
        with pytest.raises(hvd.HorovodInternalError, match="initialized"):
            hvd.allreduce(torch.ones(1))
        hvd.init(process_sets="dynamic")
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@pytest.mark.ranks(2)
def test_process_sets_that_init_is_given_twice() -> None:
    """It raises, and is initialized; a second call finds the sets."""
    size, first, rest = hvd.size(), hvd.ProcessSet([0]), hvd.ProcessSet(range(1, hvd.size()))
    hvd.shutdown()
    with pytest.raises(ValueError, match=r"process sets of the ranks \[0\], \[0, .* more than once"):
        hvd.init(process_sets=[first, hvd.ProcessSet([0]), hvd.ProcessSet(range(size)), rest])
    assert hvd.is_initialized() and (first.process_set_id, rest.process_set_id) == (1, 2)
    again, everyone = hvd.ProcessSet(reversed(range(1, size))), hvd.ProcessSet(range(size))
    hvd.init(process_sets=[again, everyone])
    assert (again.process_set_id, everyone.process_set_id) == (2, 0)
    if again.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=again).item() == size - 1
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=everyone).item() == size
    if size > 2:
        with pytest.raises(ValueError, match="which registers none"):
            hvd.init(process_sets=[[1]])
    hvd.shutdown()
    assert again.process_set_id is everyone.process_set_id is first.process_set_id is None
    hvd.init(process_sets="dynamic")


@pytest.mark.ranks(2)
def test_a_shutdown_with_operations_in_flight() -> None:
    """Each rank has submitted one that no other rank does."""
    begin = time.monotonic()
    hvd.allreduce_async(torch.ones(1), name=f"of rank {hvd.rank()} only")
    time.sleep(0.2)
    hvd.shutdown()
    assert time.monotonic() - begin < 10
    hvd.init(process_sets="dynamic")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@pytest.mark.ranks(2)
def test_a_rank_that_shuts_down_ends_the_operations_of_all() -> None:
    hvd.barrier()
    if hvd.rank() == hvd.size() - 1:
        hvd.shutdown()
    else:
        with pytest.raises(hvd.HorovodInternalError, match="Horovod has been shut down"):
            hvd.allreduce(torch.ones(1), name="alone")
        with pytest.raises(hvd.HorovodInternalError, match="Horovod has been shut down"):
            hvd.allreduce(torch.ones(1), name="afterwards")
        hvd.shutdown()
    hvd.init(process_sets="dynamic")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
