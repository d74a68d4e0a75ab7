"""Tries the operations of torch.distributed that hpctrain uses, against numbers that are known."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

_SIZES = (1, 7, 5000)
"""Elements for each rank: one, an odd number, and more than a small message."""
_DTYPES = (torch.float32, torch.float64, torch.int64, torch.bfloat16)


def wrong_collectives(device: torch.device) -> list[str]:
    """Sentences about operations over all ranks that gave other numbers than they must. Collective."""
    size = dist.get_world_size()
    return [] if size == 1 else [one for dtype in _DTYPES for each in _SIZES for one in _wrong(device, dtype, each)]


def _wrong(device: torch.device, dtype: torch.dtype, each: int) -> Iterator[str]:
    rank, size = dist.get_rank(), dist.get_world_size()
    # small whole numbers, which every dtype adds exactly in any order
    places = torch.arange(each * size, device=device)
    base = (places % 5 + 1).to(dtype)
    factors = [one % 3 + 1 for one in range(size)]
    mine, whole = base * factors[rank], base * sum(factors)
    share = slice(rank * each, (rank + 1) * each)

    def said(operation: str, found: Tensor, wanted: Tensor) -> Iterator[str]:
        wrong = (found != wanted).nonzero().flatten().tolist()
        if wrong:
            place = wrong[0]
            yield (
                f"{operation} of {wanted.numel()} elements of {str(dtype).removeprefix('torch.')} gave {float(found[place]):g} as "
                f"element {place} on rank {rank} of {size}, expected {float(wanted[place]):g}"
            )

    summed = mine.clone()
    dist.all_reduce(summed)
    yield from said("all_reduce", summed, whole)
    largest = mine.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    yield from said("all_reduce of the maximum", largest, base * max(factors))
    later = mine.clone()
    dist.all_reduce(later, async_op=True).wait()
    yield from said("all_reduce with async_op", later, whole)
    part = torch.empty(each, dtype=dtype, device=device)
    dist.reduce_scatter_single(part, mine.clone())
    yield from said("reduce_scatter", part, whole[share])
    gathered = torch.empty(each * size, dtype=dtype, device=device)
    dist.all_gather_single(gathered, (base[share] * factors[rank]).contiguous())
    yield from said(
        "all_gather", gathered, torch.cat([one * f for one, f in zip(base.split(each), factors, strict=True)])
    )
    for root in (0, size - 1):
        sent = mine.clone()
        dist.broadcast(sent, group_src=root)
        yield from said(f"broadcast from rank {root}", sent, base * factors[root])
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine.clone())
    yield from said("all_to_all", received, torch.cat([base[share] * f for f in factors]))
    kept, came = mine.clone(), torch.empty_like(mine)
    sending = dist.isend(kept, (rank + 1) % size)
    dist.recv(came, (rank - 1) % size)
    if sending is not None:
        sending.wait()
    yield from said("send and receive", came, base * factors[(rank - 1) % size])
