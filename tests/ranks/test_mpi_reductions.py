"""Reductions: every operation and dtype compared with a direct computation, and sums with the same bits everywhere."""

from __future__ import annotations

import psutil
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ReduceOp

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
COMPLEX = [torch.complex64, torch.complex128]
ELEMENTS = [0, 1, 37, 200_003]  # none, fewer than ranks, gathered whole, in pieces


def values(rank: int, elements: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """The input of `rank`, which any rank can compute."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    if dtype == torch.bool:
        return torch.rand(elements, generator=generator) < 0.5
    if dtype.is_complex:
        parts = torch.randn(elements, 2, generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    if dtype.is_floating_point:
        return (torch.randn(elements, generator=generator, dtype=torch.float64) * 3).to(dtype)
    return torch.randint(0, 5, (elements,), generator=generator).to(dtype)


def expected(op: object, inputs: list[Tensor]) -> Tensor:
    """The result in rank order, 16-bit floats in float32, as documented."""
    dtype = inputs[0].dtype
    wide = [tensor.float() if dtype in (torch.bfloat16, torch.float16) else tensor for tensor in inputs]
    total = wide[0].clone()
    for tensor in wide[1:]:
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            total = total | tensor if dtype == torch.bool else total + tensor
        elif op == ReduceOp.PRODUCT:
            total = total & tensor if dtype == torch.bool else total * tensor
        elif op == ReduceOp.MIN:
            total = torch.where(tensor < total, tensor, total)
        elif op == ReduceOp.MAX:
            total = torch.where(tensor > total, tensor, total)
        elif op == ReduceOp.BAND:
            total = total & tensor
        elif op == ReduceOp.BOR:
            total = total | tensor
        elif op == ReduceOp.BXOR:
            total = total ^ tensor
    if op == ReduceOp.AVG:
        total = total / len(inputs)
    return total.to(dtype)


def same(found: Tensor, want: Tensor) -> bool:
    """Equality bit for bit, except for complex numbers, whose division by 3 may round differently."""
    return torch.allclose(found, want) if want.is_complex() else torch.equal(found, want)


CASES = (
    [(op, dtype) for op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX) for dtype in INTEGERS + FLOATS]
    + [(op, dtype) for op in (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR) for dtype in [*INTEGERS, torch.bool]]
    + [(ReduceOp.AVG, dtype) for dtype in FLOATS + COMPLEX]
    + [(ReduceOp.SUM, dtype) for dtype in [*COMPLEX, torch.bool]]
    + [(ReduceOp.MAX, torch.bool), (ReduceOp.MIN, torch.bool), (ReduceOp.PRODUCT, torch.bool)]
)
NAMES = [f"{op.name}-{str(dtype)[6:]}" for op, dtype in CASES]


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=NAMES)
def test_all_reduce(world, op, dtype):
    for elements in ELEMENTS:
        inputs = [values(rank, elements, dtype) for rank in range(world.size)]
        want = expected(op, inputs)
        for asynchronous in (False, True):
            tensor = inputs[world.rank].clone()
            work = dist.all_reduce(tensor, op, async_op=asynchronous)
            if asynchronous:
                work.wait()
                assert work.is_completed() and work.is_success() and work.exception() is None
            assert same(tensor, want), (elements, asynchronous)


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=NAMES)
def test_reduce_scatter_and_reduce(world, op, dtype):
    for elements in (3, 50_001):
        inputs = [values(rank, elements * world.size, dtype) for rank in range(world.size)]
        whole = expected(op, inputs)
        mine = whole[world.rank * elements : (world.rank + 1) * elements]
        output = torch.zeros(elements, dtype=dtype)
        dist.reduce_scatter_single(output, inputs[world.rank].clone(), op)
        assert torch.equal(output, mine)
        output = torch.zeros(elements, dtype=dtype)
        if not dtype.is_complex:  # torch passes the list on as it is and has no complex reductions there
            dist.reduce_scatter(output, list(inputs[world.rank].clone().chunk(world.size)), op)
            assert torch.equal(output, mine)
        for root in {0, world.size - 1}:
            tensor = inputs[world.rank].clone()
            dist.reduce(tensor, root, op)
            assert torch.equal(tensor, whole if world.rank == root else inputs[world.rank])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG], ids=["sum", "avg"])
def test_sum_has_the_same_bits_whatever_the_buckets(world, op, dtype):
    elements = 3_000_017
    whole = values(world.rank, elements, dtype)
    buckets = whole.clone()
    dist.all_reduce(whole, op)
    works = []
    for start, end in [(0, 1), (1, 4096), (4096, 70_000), (70_000, 1_900_001), (1_900_001, elements)]:
        works.append(dist.all_reduce(buckets[start:end], op, async_op=True))
    for work in works:
        work.wait()
    assert torch.equal(whole, buckets)
    everywhere = torch.empty(world.size * elements, dtype=dtype)
    dist.all_gather_single(everywhere, whole)
    for other in everywhere.chunk(world.size):
        assert torch.equal(whole, other)


def test_reduce_scatter_has_the_bits_of_all_reduce(world):
    tensor = values(world.rank, 600_000 * world.size, torch.float32)
    piece = torch.empty(600_000)
    dist.reduce_scatter_single(piece, tensor)
    dist.all_reduce(tensor)
    assert torch.equal(piece, tensor.chunk(world.size)[world.rank])


def test_half_precision_is_added_in_float32(world):
    # In bf16, 256 + 1 is 256: a sum that rounds after each step stays at the first value.
    tensor = torch.full((10,), 256.0 if world.rank == 0 else 1.0, dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((10,), 256.0 + (world.size - 1)).bfloat16())


def test_nan_reaches_every_rank(world):
    for op in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.SUM):
        tensor = torch.tensor([float(world.rank), float("nan") if world.rank == world.size - 1 else 1.0])
        dist.all_reduce(tensor, op)
        assert tensor[1].isnan() and not tensor[0].isnan()


def test_coalesced(world):
    tensors = [values(world.rank, n, torch.float32, seed=n) for n in (5, 100_000, 1)]
    wants = [
        expected(ReduceOp.SUM, [values(r, n, torch.float32, seed=n) for r in range(world.size)])
        for n in (5, 100_000, 1)
    ]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    for tensor, want in zip(tensors, wants, strict=True):
        assert torch.equal(tensor, want)


@settings(max_examples=15, derandomize=True, database=None)
@given(shape=st.lists(st.integers(0, 5), max_size=4), permuted=st.booleans(), seed=st.integers(0, 99))
def test_any_shape_and_stride(world, shape, permuted, seed):
    count = torch.Size(shape).numel()
    inputs = [values(rank, count, torch.float32, seed).view(shape) for rank in range(world.size)]
    tensor = inputs[world.rank].clone()
    want = expected(ReduceOp.SUM, inputs)
    if permuted:
        tensor, want = tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor, want
    dist.all_reduce(tensor)
    assert torch.equal(tensor, want)


def test_noncontiguous_slice_leaves_the_rest_alone(world):
    for side in (6, 600):
        matrix = torch.full((side, side), float(world.rank + 1))
        dist.all_reduce(matrix[:, ::2])
        total = world.size * (world.size + 1) / 2
        assert torch.equal(matrix[:, ::2], torch.full((side, side // 2), total))
        assert torch.equal(matrix[:, 1::2], torch.full((side, side // 2), float(world.rank + 1)))


@pytest.mark.parametrize(
    ("op", "dtype", "part"),
    [
        (ReduceOp.AVG, torch.int32, "AVG of torch.int32"),
        (ReduceOp.BAND, torch.float32, "BAND of torch.float32"),
        (ReduceOp.SUM, torch.float8_e4m3fn, "not implemented for"),
        (ReduceOp.SUM, torch.uint16, "can't compute"),
    ],
)
def test_what_is_not_defined_is_refused(world, op, dtype, part):
    with pytest.raises(ValueError, match=part):
        dist.all_reduce(torch.zeros(3, dtype=dtype), op)


def test_a_sparse_tensor_is_refused(world):
    with pytest.raises(ValueError, match=r"found a tensor of layout torch\.sparse_coo, expected a dense one"):
        dist.all_reduce(torch.eye(3).to_sparse())


@pytest.mark.nightly
@pytest.mark.skipif(psutil.virtual_memory().total < 60 * 2**30, reason="needs 60 GiB of memory")
@pytest.mark.ranks(2)
def test_more_than_2_to_the_31_elements(world):
    elements = 2**31 + 5
    tensor = torch.ones(elements, dtype=torch.uint8)
    tensor[-1] = world.rank + 3
    dist.all_reduce(tensor)
    assert tensor[-1] == sum(rank + 3 for rank in range(world.size))
    assert tensor[0] == world.size and tensor[2**31] == world.size
    dist.broadcast(tensor.fill_(world.rank), 1)
    assert tensor[0] == 1 and tensor[-1] == 1
    if world.rank == 0:
        dist.send(tensor.fill_(7), 1)
    elif world.rank == 1:
        dist.recv(tensor, 0)
        assert tensor[0] == 7 and tensor[-1] == 7
    half = torch.full((2**30 + 3,), world.rank + 1, dtype=torch.uint8)
    gathered = torch.empty(world.size * half.numel(), dtype=torch.uint8)
    dist.all_gather_single(gathered, half)
    assert [int(part[-1]) for part in gathered.chunk(world.size)] == list(range(1, world.size + 1))
