"""Tries the operations of torch.distributed that hpctrain uses, against numbers that are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

# elements for each rank: one, an odd number, and more than a small message
_SIZES = (1, 7, 5000)
_LARGE = 300_001
# by dtype, a factor whose last bit no narrower one has
_DTYPES = {torch.float32: 1 + 2**-14, torch.float64: 1 + 2**-42, torch.int64: 2**50 + 1, torch.bfloat16: 1}


def wrong_collectives(device: torch.device) -> list[str]:
    """Sentences about operations over all ranks, and over some, that gave other numbers than they must, or failed. Collective."""
    size = dist.get_world_size()
    if size == 1:
        return []
    sizes = [(dtype, each) for dtype in _DTYPES for each in _SIZES] + [(torch.float32, _LARGE)]
    wrong = [one for dtype, each in sizes for one in _Trial(device, dtype, each).wrong()]
    return wrong + [one for ranks in _pairs(size) for one in _wrong_among(ranks, device)]


def _pairs(size: int) -> list[tuple[int, int]]:
    """Groups of one size with different members: neighbours, and the first rank with the last."""
    return list(dict.fromkeys([*((one, one + 1) for one in range(size - 1)), (0, size - 1)]))


def _wrong_among(ranks: tuple[int, int], device: torch.device) -> list[str]:
    """A sentence if the sum over a group of some ranks is wrong. Collective over all."""
    group = dist.new_group(list(ranks))
    if dist.get_rank() not in ranks:
        return []
    found = torch.tensor([float(2 ** dist.get_rank())], device=device)
    dist.all_reduce(found, group=group)
    wanted = sum(2.0**rank for rank in ranks)
    told = f"all_reduce over a group of the ranks {ranks[0]} and {ranks[1]} gave {float(found):g}, expected {wanted:g}"
    return [] if float(found) == wanted else [told]


class _Trial:
    """Each operation once, on small multiples of a number, which its dtype adds exactly in any order."""

    def __init__(self, device: torch.device, dtype: torch.dtype, each: int) -> None:
        """each: elements for each rank."""
        self._rank, self._size, self._each = dist.get_rank(), dist.get_world_size(), each
        self._base = (torch.arange(each * self._size, device=device) % 5 + 1).to(dtype) * _DTYPES[dtype]
        self._factors = [one % 3 + 1 for one in range(self._size)]
        self._share = slice(self._rank * each, (self._rank + 1) * each)

    def wrong(self) -> Iterator[str]:
        """Sentences about the operations that are wrong."""
        for name, operation in _OPERATIONS.items():
            try:
                found, wanted = operation(self)
            except (RuntimeError, NotImplementedError) as error:
                if operation is _Trial.sum_of_columns:
                    continue  # a backend may refuse them
                yield f"{name} raised {type(error).__name__}: {str(error).splitlines()[0]}"
                continue
            wrong = (found != wanted).nonzero().flatten().tolist()
            if wrong:
                place, dtype = wrong[0], str(wanted.dtype).removeprefix("torch.")
                yield (
                    f"{name} of {wanted.numel()} elements of {dtype} gave {float(found[place]):.17g} as element {place} on rank "
                    f"{self._rank} of {self._size}, expected {float(wanted[place]):.17g}"
                )

    def mine(self, rank: int | None = None) -> Tensor:
        """Numbers of a rank, this one by default."""
        return self._base * self._factors[self._rank if rank is None else rank]

    def sum(self) -> tuple[Tensor, Tensor]:
        found = self.mine()
        dist.all_reduce(found)
        return found, self._base * sum(self._factors)

    def sum_later(self) -> tuple[Tensor, Tensor]:
        found = self.mine()
        work = dist.all_reduce(found, async_op=True)
        assert work is not None
        work.wait()
        return found, self._base * sum(self._factors)

    def sum_of_columns(self) -> tuple[Tensor, Tensor]:
        found = self.mine().view(self._size, self._each)
        dist.all_reduce(found.t())
        return found.flatten(), self._base * sum(self._factors)

    def maximum(self) -> tuple[Tensor, Tensor]:
        found = self.mine()
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return found, self._base * max(self._factors)

    def reduce_scatter(self) -> tuple[Tensor, Tensor]:
        found = torch.empty_like(self._base[self._share])
        dist.reduce_scatter_single(found, self.mine())
        return found, (self._base * sum(self._factors))[self._share]

    def all_gather(self) -> tuple[Tensor, Tensor]:
        found = torch.empty_like(self._base)
        dist.all_gather_single(found, self.mine()[self._share].contiguous())
        parts = zip(self._base.split(self._each), self._factors, strict=True)
        return found, torch.cat([part * factor for part, factor in parts])

    def broadcast(self) -> tuple[Tensor, Tensor]:
        found = self.mine()
        dist.broadcast(found, group_src=self._size - 1)
        return found, self.mine(self._size - 1)

    def all_to_all(self) -> tuple[Tensor, Tensor]:
        found = torch.empty_like(self._base)
        dist.all_to_all_single(found, self.mine())
        return found, torch.cat([self._base[self._share] * factor for factor in self._factors])

    def send(self) -> tuple[Tensor, Tensor]:
        sent, found, before = self.mine(), torch.empty_like(self._base), (self._rank - 1) % self._size
        work = dist.isend(sent, (self._rank + 1) % self._size)
        dist.recv(found, before)
        if work is not None:
            work.wait()
        return found, self.mine(before)


# numbers that each operation gave, and those that it must
_OPERATIONS: dict[str, Callable[[_Trial], tuple[Tensor, Tensor]]] = {
    "all_reduce": _Trial.sum,
    "all_reduce with async_op": _Trial.sum_later,
    "all_reduce of columns": _Trial.sum_of_columns,
    "all_reduce of the maximum": _Trial.maximum,
    "reduce_scatter": _Trial.reduce_scatter,
    "all_gather": _Trial.all_gather,
    "broadcast from the last rank": _Trial.broadcast,
    "all_to_all": _Trial.all_to_all,
    "send and receive": _Trial.send,
}
