"""The pieces of all ranks cover each trained parameter once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist

from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.plugin import broken
from hpctrain.contracts.sharding import Sharding
from hpctrain.model.mesh import Meshes

_BITS = 2**64


def refuse_holes(
    plugin: Sharding, pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, ...]], meshes: Meshes
) -> None:
    """Raises ContractError unless the pieces of all ranks hold every element of the trained parameters once, but for replicas.

    Compares the number of elements and the sum of their places, each modulo 2**64. Collective over all ranks.
    """
    names = {name: row for row, name in enumerate(shapes)}
    found = torch.zeros(len(names), 2, dtype=torch.int64)
    odd = 0
    for piece in pieces:
        if not _is_within(piece, shapes.get(piece.name)):
            odd += 1
        elif meshes.counts(piece.axes):
            count, places = len_and_places(piece.shape, piece.offsets, tuple(piece.tensor.shape))
            found[names[piece.name]] += torch.tensor([_signed(count), _signed(places)])
    totals = torch.cat([found.view(-1), torch.tensor([odd])])
    dist.all_reduce(totals)
    odd = int(totals[-1])
    if odd:
        raise broken(
            plugin,
            f"gave {odd} pieces outside of the trained parameters",
            "their names, shapes and offsets",
        )
    for (name, shape), (count, places) in zip(shapes.items(), totals[:-1].view(-1, 2).tolist(), strict=True):
        wanted = len_and_places(shape, (0,) * len(shape), shape)
        if (count, places) != tuple(map(_signed, wanted)):
            told = f"{count:,} of" if count != wanted[0] else "some elements twice and others never among the"
            raise broken(
                plugin,
                f"gave pieces with {told} {wanted[0]:,} elements of {name}",
                "each element once, but for replicas",
            )


def len_and_places(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """The elements of a rectangle of a tensor, and the sum of their places in its row-major order."""
    total, stride, places = prod(lengths), prod(shape), 0
    for size, begin, length in zip(shape, offsets, lengths, strict=True):
        stride //= size or 1
        places += stride * (length * begin + length * (length - 1) // 2) * (total // length if length else 0)
    return total, places


def _is_within(piece: Piece, shape: tuple[int, ...] | None) -> bool:
    lengths = tuple(piece.tensor.shape)
    if shape is None or tuple(piece.shape) != shape or len(lengths) != len(shape) or len(piece.offsets) != len(shape):
        return False
    return all(at >= 0 and at + n <= size for at, n, size in zip(piece.offsets, lengths, shape, strict=True))


def _signed(number: int) -> int:
    """`number` modulo 2**64 as int64 has it."""
    return (number + _BITS // 2) % _BITS - _BITS // 2
