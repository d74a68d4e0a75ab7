"""Compares the parameters of ranks that hold the same ones: silent data corruption makes them differ."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.base.devices import is_accelerator
from hpctrain.base.errors import TrainingError
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.pieces import Piece, pieces_of
from hpctrain.model.mesh import Meshes
from hpctrain.ranks.json_collectives import gather_values, sum_of
from hpctrain.training.guard.first_nonfinite import SHOWN, named_ranks

_ROW = 1 << 14
"""Words that share a table of factors. Temporary copies of them fit into a CPU's cache."""
_ROWS = 64
"""Rows at a time on an accelerator, where each operation costs a launch."""


class Replicas:
    """Every rank's parameters, against those of the ranks that hold replicas of them along the data axes.

    Before an update: a strategy that gathers parameters after it would hide a wrong copy. Optimizer state and summed gradients
    need no check of their own: a difference in them makes the next update's parameters differ.
    """

    def __init__(self, module: nn.Module, meshes: Meshes, identity: Identity) -> None:
        self._module, self._meshes, self._identity = module, meshes, identity
        spread = [axis for axis in meshes.model.mesh_dim_names or () if axis not in meshes.data_axes]
        self._place = [meshes.axis(axis).get_local_rank() for axis in spread]
        """This rank's place among the ranks that hold other parts of the model."""
        self._equal_at: int | None = None

    def exist(self) -> bool:
        """Whether any two ranks hold the same parameters. Collective over all ranks."""
        return bool(sum_of(sum(len(self._groups(axes)) for axes in {piece.axes for piece in self._pieces()})))

    def check(self, step: int) -> None:
        """Compare the parameters after `step` steps. Raises TrainingError on all ranks if any differ. Collective over all ranks."""
        found = [(piece, checksum(piece.tensor)) for piece in self._pieces()]
        differs = sum(self._differs(axes, found) for axes in sorted({piece.axes for piece, _ in found}))
        if not sum_of(differs):
            self._equal_at = step
            return
        mine = {f"{piece.name} {piece.offsets}": value for piece, value in found} if differs else {}
        everyone = gather_values((self._identity.node, self._place, mine))
        before = "" if self._equal_at is None else f", the last time after {self._equal_at} steps"
        raise TrainingError(
            f"after {step} steps {_sentence(everyone)}; memory or a processor there may be faulty: leave out the node, and start "
            f"again with --resume and a checkpoint from when the replicas were equal{before}",
            everywhere=True,
        )

    def _pieces(self) -> Iterator[Piece]:
        for name, parameter in self._module.named_parameters():
            yield from (piece for piece in pieces_of(self._module, name, parameter) if piece.tensor.numel())

    def _groups(self, axes: Sequence[str]) -> list[dist.ProcessGroup]:
        """The ranks along each data axis that hold replicas of pieces with these axes."""
        groups = [self._meshes.group(axis, axes) for axis in self._meshes.data_axes if axis not in axes]
        return [group for group in groups if group.size() > 1]

    def _differs(self, axes: Sequence[str], found: Sequence[tuple[Piece, int]]) -> bool:
        """Whether any rank of this rank's groups has other values in pieces with these axes."""
        content = ",".join(str(value) for piece, value in found if piece.axes == axes)
        digest = int.from_bytes(hashlib.sha256(content.encode()).digest()[:7], "big")
        differs = False
        for group in self._groups(axes):
            ends = torch.tensor([digest, -digest])
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
            differs |= bool(ends[0] != -ends[1])
        return differs


def _sentence(everyone: Sequence[tuple[str, Sequence[int], Mapping[str, int]]]) -> str:
    """Who has other values than its replicas, in which tensor. everyone: node, place and checksums of every rank."""
    nodes = [node for node, _, _ in everyone]
    replicas: dict[tuple[tuple[int, ...], str], dict[int, int]] = {}
    for rank, (_, where, checksums) in enumerate(everyone):
        for key, value in checksums.items():
            replicas.setdefault((tuple(where), key), {})[rank] = value
    faults = {key: found for key, found in replicas.items() if len(set(found.values())) > 1}
    (_, tensor), found = next(iter(faults.items()))
    name = tensor.partition(" ")[0]
    others = len({key.partition(" ")[0] for _, key in faults} - {name})
    more = f" (and in {others} other tensor{'s' * (others > 1)})" if others else ""
    (right, most), (_, fewer) = Counter(found.values()).most_common(2)
    if most == fewer:
        shown = ", ".join(f"rank {rank} on {nodes[rank]} has checksum {value:016x}" for rank, value in found.items())
        return f"the replicas of {name} differ{more}, and no value is in the majority: {shown}"
    wrong = [rank for rank, value in found.items() if value != right]
    seen = ", ".join(f"{found[rank]:016x}" for rank in wrong[:SHOWN])
    agreed = f"expected {right:016x} as on {most} replicas"
    return f"{named_ranks(wrong, nodes)}: found checksum {seen} of {name}{more}, {agreed}"


_INTEGERS = {1: torch.uint8, 2: torch.int16}
"""Integers by the bytes of an element. Wider ones are words of 32 bits: of 64 bits, the product would lose the highest ones'
place."""


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """64 bits made of the tensor's bytes, whatever its dtype. Two tensors that differ in one element never have the same ones.

    The sum of each word times an odd number that depends on its place, modulo 2^64: no odd number loses a difference. The order
    of a sum of integers does not matter.
    """
    plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    words = plain.reshape(-1).contiguous().view(_INTEGERS.get(plain.element_size(), torch.int32))
    factors = _odd(0, min(len(words), _ROW), words.device)
    even = len(words) // _ROW * _ROW
    sums = [_sum_of(words[even:], factors[: len(words) - even])[None]]
    step = _ROWS if is_accelerator(words.device) else 1
    sums += [_sum_of(rows, factors) for rows in words[:even].view(-1, _ROW).split(step)] if even else []
    of_rows = torch.cat(sums)
    return int(_sum_of(of_rows, _odd(_ROW, len(of_rows), words.device))) & (2**64 - 1)


def _sum_of(words: Tensor, factors: Tensor) -> Tensor:
    """(..., n) and (n,) -> (...)"""
    return (words * factors).sum(-1)


def _odd(first: int, count: int, device: torch.device) -> Tensor:
    """Odd numbers of 64 bits without a pattern, (count,): SplitMix64 (Steele et al., 2014) mixes so."""
    mixed = torch.arange(first, first + count, device=device) * -7046029254386353131  # 2^64 divided by the golden ratio
    return ((mixed ^ (mixed >> 31)) * -4658895280553007687) | 1
