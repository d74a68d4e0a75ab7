"""Compares the parameters of ranks that hold the same ones, and the blocks that ranks ran whose parameters they gather together.

Code that does other things on each rank makes them differ; silent data corruption, too, makes parameters differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_

import torch
from torch import Tensor, nn

from hpctrain.base.errors import TrainingError
from hpctrain.contracts.identity import Identity
from hpctrain.contracts.pieces import Piece, pieces_of
from hpctrain.model.mesh import Meshes
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.training.figures import Figure

_EVERY, _FIRST = 50, (2, 10)  # steps between two glances, and those of the first two
_SHOWN = 4  # the most ranks that a sentence names
_SLICE = 8  # elements of each parameter that a glance takes
# integers by the bytes of an element; wider ones are words of 32 bits
_INTEGERS = {1: torch.uint8, 2: torch.int16}


class Replicas:
    """Every rank's parameters, against those of the ranks that hold replicas of them along the data axes.

    Before an update: a strategy that gathers parameters after it would hide a wrong copy. Optimizer state and summed gradients
    need no check of their own: a difference in them makes the next update's parameters differ.
    """

    def __init__(self, module: nn.Module, meshes: Meshes, identity: Identity, name: str | None = None) -> None:
        """Collective over all ranks. name: of one model among others."""
        self._module, self._identity = module, identity
        self._of = "" if name is None else f"{name}."
        self._equal_at: int | None = None
        spread = [axis for axis in meshes.model.mesh_dim_names or () if axis not in meshes.data_axes]
        # this rank's place among the ranks that hold other parts of the model
        self._place = [meshes.axis(axis).get_local_rank() for axis in spread]
        cut = sorted({axis for piece in self._pieces() for axis in piece.axes})
        ranks: dict[str, list[int]] = {}
        here = [*self._place, *(meshes.axis(axis).get_local_rank() for axis in cut)]
        for rank, place in enumerate(gather_values(here)):
            ranks.setdefault(str(place), []).append(rank)
        # the ranks that hold the same
        self._alike = [group for group in ranks.values() if len(group) > 1]

    def glance(self, step: int) -> Figure:
        """A number made of a few elements of each parameter after `step` steps, equal on ranks that hold the same; 0.0 in most
        steps. Costs an exchange no more than the number."""
        if not self._alike or not (step % _EVERY == 0 or step in _FIRST):
            return 0.0
        words = [_words(piece.tensor, step) for piece in self._pieces()]
        # 52 bits are exact in the float64 of an exchange
        return (_sum_of(torch.cat(words or [torch.zeros(1, dtype=torch.int64)])) & (2**52 - 1)).to(torch.float64)

    def compare(self, step: int, glances: Sequence[float]) -> None:
        """Raises TrainingError on all ranks if replicas differ after `step` steps. Collective where they do. glances: of all."""
        if not any(len({glances[rank] for rank in group}) > 1 for group in self._alike):
            self._equal_at = step if any(glances) else self._equal_at
            return
        mine = {
            f"{self._of}{one.name} {one.offsets}": int(_sum_of(_words(one.tensor, step))) & (2**64 - 1)
            for one in self._pieces()
        }
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
    holders: dict[int, list[int]] = {}
    for rank, value in found.items():
        holders.setdefault(value, []).append(rank)
    # the fewest first: they are wrong, if any are
    by_size = sorted(holders.items(), key=lambda item: len(item[1]))[:_SHOWN]
    shown = ", ".join(f"{value:016x} on {named_ranks(ranks, nodes)}" for value, ranks in by_size)
    return f"the replicas of {name} differ{more}: found the checksum {shown}"


def named_ranks(ranks: Sequence[int], nodes: Sequence[str]) -> str:
    """ "rank 1 on n0, rank 2 on n1". nodes: of every rank of the world."""
    shown = [f"rank {rank} on {nodes[rank]}" for rank in ranks[:_SHOWN]]
    return ", ".join([*shown, f"{len(ranks) - _SHOWN} more"] if len(ranks) > _SHOWN else shown)


def _words(tensor: Tensor, step: int) -> Tensor:
    """The bytes of a few neighbouring elements as integers of 64 bits, (n,); of others at other steps."""
    flat = tensor.detach().reshape(-1)
    begin = step * 40503 % max(1, len(flat) - _SLICE + 1)
    few = flat[begin : begin + _SLICE]
    plain = torch.view_as_real(few).reshape(-1) if few.is_complex() else few
    return plain.contiguous().view(_INTEGERS.get(plain.element_size(), torch.int32)).to(torch.int64)


def _sum_of(words: Tensor) -> Tensor:
    """The sum of each word times an odd number that depends on its place, modulo 2^64: no odd number loses a difference, and the
    order of a sum of integers does not matter. SplitMix64 (Steele et al., 2014) makes numbers without a pattern so."""
    mixed = torch.arange(len(words), device=words.device) * -7046029254386353131  # 2^64 divided by the golden ratio
    return (words * (((mixed ^ (mixed >> 31)) * -4658895280553007687) | 1)).sum()


def parted(ran: Mapping[int, Sequence[str]]) -> str | None:
    """A sentence if ranks ran different blocks of a model, as with LayerDrop; None where one is only further than another.

    ran: `ShardedModel.ran` by rank.
    """
    first, *others = sorted(ran)
    pairs = [(rank, pair) for rank in others for pair in zip(ran[first], ran[rank], strict=False) if pair[0] != pair[1]]
    if not pairs:
        return None
    counts = {rank: Counter(filter(None, names)) for rank, names in ran.items()}
    most = reduce(or_, counts.values())
    lacking = {rank: ", ".join(sorted({*(most - one)})[:_SHOWN]) for rank, one in counts.items()}
    told = [f"rank {rank} left out {names}" for rank, names in lacking.items() if names]
    rank, (one, another) = pairs[0]
    told = told[:_SHOWN] or [f"rank {first} ran {one} where rank {rank} ran {another}"]
    return (
        f"ranks ran different blocks of the model ({'; '.join(told)}), whose parameters they gather together; expected the same on "
        "all: let ranks draw alike what decides (LayerDrop: a generator with one seed), or use [sharding] stage 2"
    )
