"""Rectangles of a tensor: `offsets` is where one starts, and `shape` its extent, a number per dim."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

Dims = tuple[int, ...]

MOST_DIMS_CUT = 8
"""The most dims along which a tensor may be cut: a check takes time in proportion to 2 to this power."""


class Rectangle(NamedTuple):
    """A part of a tensor, in the tensor's own coordinates."""

    offsets: Dims
    shape: Dims

    @property
    def volume(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: Rectangle) -> Rectangle | None:
        """The intersection, or None."""
        begins = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return Rectangle(begins, shape) if all(length > 0 for length in shape) else None

    def slices(self, part: Rectangle) -> tuple[slice, ...]:
        """The place of `part` within this rectangle, for indexing a tensor that holds this rectangle."""
        begins = (inner - outer for inner, outer in zip(part.offsets, self.offsets, strict=True))
        return tuple(slice(begin, begin + length) for begin, length in zip(begins, part.shape, strict=True))

    def _ends(self) -> Dims:
        return tuple(offset + length for offset, length in zip(self.offsets, self.shape, strict=True))


def tiling_fault(shape: Dims, rectangles: Sequence[Rectangle]) -> str | None:
    """The reason why `rectangles` don't cover a tensor of `shape` exactly once, or None when they do."""
    for rectangle in rectangles:
        if len(rectangle.offsets) != len(shape) or len(rectangle.shape) != len(shape):
            return f"{_text(rectangle)} doesn't have the {len(shape)} dims of {list(shape)}"
        inside = zip(rectangle.offsets, rectangle.shape, shape, strict=True)
        if not all(offset >= 0 and length >= 0 and offset + length <= whole for offset, length, whole in inside):
            return f"{_text(rectangle)} lies outside of {list(shape)}"
    filled = [rectangle for rectangle in rectangles if rectangle.volume > 0]  # ranks may hold nothing of a tensor
    cut = [dim for dim, whole in enumerate(shape) if any(rectangle.shape[dim] != whole for rectangle in filled)]
    if len(cut) > MOST_DIMS_CUT:  # a crafted file must not keep the check busy
        return f"it is cut along {len(cut)} dims, expected at most {MOST_DIMS_CUT}"
    if _cover_once(Rectangle((0,) * len(shape), shape), filled, cut):
        return None
    covered, whole = sum(rectangle.volume for rectangle in filled), math.prod(shape)
    why = "there is a hole" if covered < whole else "some overlap"
    return f"its parts hold {covered} of the {whole} elements of {list(shape)}: {why}"


def _cover_once(whole: Rectangle, rectangles: Sequence[Rectangle], cut: Sequence[int]) -> bool:
    """Whether each element of `whole` is in exactly one of the rectangles, which span all dims but those in `cut`.

    The corners of a rectangle, those with an odd number of ends counted negative, are the mixed differences of the function
    that is 1 in it and 0 elsewhere. Such functions are equal exactly if their differences are: no two rectangles have
    to be compared, however they lie.
    """
    corners: Counter[Dims] = Counter()
    signs = [math.prod(signs) for signs in itertools.product((1, -1), repeat=len(cut))]
    for rectangle, factor in [(whole, -1), *((part, 1) for part in rectangles)] if whole.volume else []:
        edges = [(rectangle.offsets[dim], rectangle.offsets[dim] + rectangle.shape[dim]) for dim in cut]
        for corner, sign in zip(itertools.product(*edges), signs, strict=True):
            corners[corner] += factor * sign
    return not any(corners.values())


def _text(rectangle: Rectangle) -> str:
    return f"the part {list(rectangle.shape)} at {list(rectangle.offsets)}"
