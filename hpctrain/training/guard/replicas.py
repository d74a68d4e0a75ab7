"""Compares the parameters of ranks that hold the same ones. Code that does other things on each rank makes them differ, and silent
data corruption does."""

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
from hpctrain.training.metrics import Figure

_EVERY, _FIRST = 50, (2, 10)
"""Steps between two glances, and those of the first two."""
_SLICE = 8
"""Elements of each parameter that a glance takes."""
_ROW = 1 << 14
"""Words that share a table of factors. Temporary copies of them fit into a CPU's cache."""
_ROWS = 64
"""Rows at a time on an accelerator, where each operation costs a launch."""


class Replicas:
    """Every rank's parameters, against those of the ranks that hold replicas of them along the data axes.

    Before an update: a strategy that gathers parameters after it would hide a wrong copy. Optimizer state and summed gradients
    need no check of their own: a difference in them makes the next update's parameters differ.
    """

    def __init__(
        self, module: nn.Module, meshes: Meshes, identity: Identity, every: int = 0, name: str | None = None
    ) -> None:
        """every: steps between two comparisons of whole parameters; 0 for glances only. name: of one model among others."""
        self._module, self._meshes, self._identity, self._every = module, meshes, identity, every
        self._of = "" if name is None else f"{name}."
        spread = [axis for axis in meshes.model.mesh_dim_names or () if axis not in meshes.data_axes]
        self._place = [meshes.axis(axis).get_local_rank() for axis in spread]
        """This rank's place among the ranks that hold other parts of the model."""
        self._equal_at: int | None = None
        self._alike: list[list[int]] = []

    def exist(self) -> bool:
        """Whether any two ranks hold the same parameters; `glance` and `compare` need to know. Collective over all ranks."""
        axes = sorted({axis for piece in self._pieces() for axis in piece.axes})
        ranks: dict[str, list[int]] = {}
        here = [*self._place, *(self._meshes.axis(axis).get_local_rank() for axis in axes)]
        for rank, place in enumerate(gather_values(here)):
            ranks.setdefault(str(place), []).append(rank)
        self._alike = [group for group in ranks.values() if len(group) > 1]
        return bool(sum_of(sum(len(self._groups(axes)) for axes in {piece.axes for piece in self._pieces()})))

    def glance(self, step: int) -> Figure:
        """A number made of a few elements of each parameter after `step` steps, equal on ranks that hold the same; 0.0 in most
        steps. Costs an exchange no more than the number."""
        if not self._alike or not (step % _EVERY == 0 or step in _FIRST):
            return 0.0
        slices = [_words(_few(piece.tensor, step)).to(torch.int64) for piece in self._pieces()]
        words = torch.cat(slices) if slices else torch.zeros(1, dtype=torch.int64)
        return (_sum_of(words, _odd(0, len(words), words.device)) & (2**52 - 1)).to(torch.float64)

    def compare(self, step: int, glances: Sequence[float]) -> None:
        """Raises TrainingError on all ranks if replicas differ after `step` steps. Collective where they do, or where the job asks
        for a comparison. glances: of all ranks."""
        due = self._every and (step + 1) % self._every == 0
        if due or any(len({glances[rank] for rank in group}) > 1 for group in self._alike):
            self.check(step)
        elif any(glances):
            self._equal_at = step

    def check(self, step: int) -> None:
        """Compare the parameters after `step` steps. Raises TrainingError on all ranks if any differ. Collective over all ranks."""
        found = [(piece, checksum(piece.tensor)) for piece in self._pieces()]
        differs = sum(self._differs(axes, found) for axes in sorted({piece.axes for piece, _ in found}))
        if not sum_of(differs):
            self._equal_at = step
            return
        mine = {f"{self._of}{piece.name} {piece.offsets}": value for piece, value in found} if differs else {}
        everyone = gather_values((self._identity.node, self._place, mine))
        before = "" if self._equal_at is None else f", the last time after {self._equal_at} steps"
        raise TrainingError(
            f"after {step} steps {_sentence(everyone)}; a plugin, an optimizer or a schedule may do other things on each rank, or "
            "memory or a processor there may be faulty: leave out the node, and start again with --resume and a checkpoint from "
            f"when the replicas were equal{before}"
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


def _few(tensor: Tensor, step: int) -> Tensor:
    """Neighbouring elements, others at other steps."""
    flat = tensor.detach().reshape(-1)
    begin = step * 40503 % max(1, len(flat) - _SLICE + 1)
    return flat[begin : begin + _SLICE]


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as integers, (n,)."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return plain.reshape(-1).contiguous().view(_INTEGERS.get(plain.element_size(), torch.int32))


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """64 bits made of the tensor's bytes, whatever its dtype. Two tensors that differ in one element never have the same ones.

    The sum of each word times an odd number that depends on its place, modulo 2^64: no odd number loses a difference. The order
    of a sum of integers does not matter.
    """
    words = _words(tensor.detach())
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
