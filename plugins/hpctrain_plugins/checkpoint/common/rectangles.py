"""Rectangles of a tensor: `offsets` where one begins and `shape` how far it reaches, one number per dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Dims = tuple[int, ...]


class Rectangle(NamedTuple):
    """A part of a tensor, in the tensor's own coordinates."""

    offsets: Dims
    shape: Dims

    @property
    def volume(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def overlap(self, other: Rectangle) -> Rectangle | None:
        """What both cover, or None."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Rectangle(begins, shape) if all(length > 0 for length in shape) else None

    def slices(self, part: Rectangle) -> tuple[slice, ...]:
        """Where `part` lies within this rectangle, for indexing a tensor that holds this rectangle."""
        begins = (inner - outer for inner, outer in zip(part.offsets, self.offsets, strict=True))
        return tuple(slice(begin, begin + length) for begin, length in zip(begins, part.shape, strict=True))

    def _ends(self) -> Dims:
        return tuple(offset + length for offset, length in zip(self.offsets, self.shape, strict=True))


def tiling_fault(shape: Dims, rectangles: Sequence[Rectangle]) -> str | None:
    """Why `rectangles` don't cover a tensor of `shape` exactly once, or None when they do."""
    for rectangle in rectangles:
        if len(rectangle.offsets) != len(shape) or len(rectangle.shape) != len(shape):
            return f"{_text(rectangle)} doesn't have the {len(shape)} dims of {list(shape)}"
        inside = zip(rectangle.offsets, rectangle.shape, shape, strict=True)
        if not all(offset >= 0 and length >= 0 and offset + length <= whole for offset, length, whole in inside):
            return f"{_text(rectangle)} lies outside of {list(shape)}"
    clash = _first_overlap([rectangle for rectangle in rectangles if rectangle.volume > 0])
    if clash is not None:
        return f"{_text(clash[0])} and {_text(clash[1])} overlap"
    held, whole = sum(rectangle.volume for rectangle in rectangles), math.prod(shape)
    return None if held == whole else f"its parts hold {held} of the {whole} elements of {list(shape)}: there is a hole"


def _first_overlap(rectangles: list[Rectangle]) -> tuple[Rectangle, Rectangle] | None:
    """Sweep along the dim that is cut most, comparing only with the rectangles that reach past the sweep line."""
    if len(rectangles) < 2:
        return None
    dims = range(len(rectangles[0].shape))
    if not dims:
        return rectangles[0], rectangles[1]
    along = max(dims, key=lambda dim: len({rectangle.offsets[dim] for rectangle in rectangles}))
    reaching: list[Rectangle] = []
    for rectangle in sorted(rectangles, key=lambda one: one.offsets[along]):
        begin = rectangle.offsets[along]
        reaching = [one for one in reaching if one.offsets[along] + one.shape[along] > begin]
        for other in reaching:
            if rectangle.overlap(other):
                return other, rectangle
        reaching.append(rectangle)
    return None


def _text(rectangle: Rectangle) -> str:
    return f"the part {list(rectangle.shape)} at {list(rectangle.offsets)}"
