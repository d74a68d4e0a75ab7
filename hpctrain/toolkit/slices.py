"""Cuts a slice of a flattened tensor into rectangles: a slice is a few rectangles one after the other."""

from __future__ import annotations

from math import prod

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and lengths, one per dim."""


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> list[Rectangle]:
    """Cut the elements `begin` to `end` of a row-major tensor of `shape` into rectangles, in the order of the elements.

    They are the rest of a first row, whole rows, and the beginning of a last row. Partial rows are cut in the same way. So
    there are at most 2 x dims - 1 rectangles.
    """
    if begin >= end:
        return []
    if not shape:
        return [((), ())]
    row = prod(shape[1:])
    first, into_first = divmod(begin, row)
    last, into_last = divmod(end, row)
    if first == last:
        return _in_row(first, rectangles(shape[1:], into_first, into_last))
    found = []
    if into_first:
        found += _in_row(first, rectangles(shape[1:], into_first, row))
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + _in_row(last, rectangles(shape[1:], 0, into_last))


def _in_row(row: int, inner: list[Rectangle]) -> list[Rectangle]:
    return [((row, *offsets), (1, *lengths)) for offsets, lengths in inner]
