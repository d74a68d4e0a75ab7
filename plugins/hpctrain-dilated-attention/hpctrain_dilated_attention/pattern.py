"""The tokens that see each other. Everything here is arithmetic on places; nothing is communicated or computed.

A group cuts the sequence into segments of one length and selects every `rate`-th token of each, for head h from token
h mod rate of the segment on. Selected tokens see each other, within a segment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import floor

_TOGETHER = 16384
"""Tokens whose whole segments are computed at once: copies of them take no more memory in longer sequences."""


@dataclass(frozen=True)
class Pattern:
    """The groups of a dilated attention.

    segment_lengths, dilation_rates: of each group. block: selected tokens of a block, where attention is block-sparse; None
    where it is not. sparsity_ratio: the share of distances between blocks that are left out.
    """

    segment_lengths: tuple[int, ...]
    dilation_rates: tuple[int, ...]
    causal: bool = True
    block: int | None = None
    sparsity_ratio: float = 0.0

    @property
    def groups(self) -> list[tuple[int, int]]:
        """Segment length and dilation rate of each group."""
        return list(zip(self.segment_lengths, self.dilation_rates, strict=True))

    def distances(self, blocks: int) -> list[int]:
        """The distances, in blocks, at which a block of queries sees a block of keys, in whole segments of so many blocks."""
        kept = max(1, blocks - floor(self.sparsity_ratio * blocks))
        return [number * blocks // kept for number in range(kept)]

    def pairs(self, tokens: int, heads: int) -> int:
        """Pairs of a query and a key over all heads; as many later keys as earlier ones, causal or not."""
        found = 0
        for span in spans(self, Place(tokens, 0, tokens, 0, heads)):
            many = len(span.heads) * len(span.starts)
            for step in steps(self, span, span.held):
                sides = 2 if self.causal and not step.causal else 1
                found += many * sides * step.queries * step.keys * step.count
        return found


@dataclass(frozen=True)
class Place:
    """The tokens `begin` to `end` of a sequence of `tokens`, and `heads` heads from `first_head` on: what a rank has."""

    tokens: int
    begin: int
    end: int
    first_head: int
    heads: int


@dataclass(frozen=True)
class Span:
    """Segments of one group of which a rank has the same part, and the heads for which it does.

    Selected tokens are counted within their segment: the rank has `begin` to `end` of `total`.
    """

    group: int
    length: int
    """Tokens of a whole segment."""
    rate: int
    heads: tuple[int, ...]
    """Heads, counted on this rank."""
    phases: tuple[int, ...]
    """The first selected token of a segment, for each of the heads."""
    starts: tuple[int, ...]
    """The first token of each segment, in the whole sequence."""
    begin: int
    end: int
    total: int

    @property
    def held(self) -> tuple[int, int]:
        """The selected tokens that the rank has."""
        return self.begin, self.end

    def others(self, causal: bool) -> list[tuple[int, int]]:
        """The selected tokens of the segments that other ranks have and this one's see."""
        apart = [(0, self.begin)] if causal else [(0, self.begin), (self.end, self.total)]
        return [(begin, end) for begin, end in apart if begin < end]


def spans(pattern: Pattern, place: Place) -> Iterator[Span]:
    """The work of a rank: first, of each group, the segments that it has as a whole."""
    for group, (length, rate) in enumerate(pattern.groups):
        whole, apart = [], []
        for start in range(place.begin // length * length, place.end, length):
            if place.begin <= start and start + length <= place.end:
                whole.append(start)
            else:
                apart.append([start])
        many = max(1, _TOGETHER // length)
        for together in [*(whole[at : at + many] for at in range(0, len(whole), many)), *apart]:
            yield from _by_heads(group, rate, length, together, place)


def _by_heads(group: int, rate: int, length: int, starts: list[int], place: Place) -> Iterator[Span]:
    first, end = starts[0], min(starts[0] + length, place.tokens)
    classes: dict[tuple[int, int, int], list[int]] = {}
    for head in range(place.heads):
        phase = (place.first_head + head) % rate
        counts = (_selected(until - first - phase, rate) for until in (place.begin, min(place.end, end), end))
        classes.setdefault(tuple(counts), []).append(head)  # type: ignore[arg-type]
    for (begin, until, total), heads in classes.items():
        if begin < until:
            phases = tuple((place.first_head + head) % rate for head in heads)
            yield Span(group, length, rate, tuple(heads), phases, tuple(starts), begin, until, total)


def _selected(tokens: int, rate: int) -> int:
    """Selected tokens among so many, the first of which is one."""
    return max(0, _up(tokens, rate))


@dataclass(frozen=True)
class Step:
    """Attention of `count` pieces of queries to as many pieces of keys, one after the other: places among those of a span."""

    query: int
    key: int
    queries: int
    """Queries of a piece."""
    keys: int
    count: int
    causal: bool


def steps(pattern: Pattern, span: Span, keys: tuple[int, int]) -> Iterator[Step]:
    """The parts in which a span's tokens see the selected tokens `keys` of its segments: those of the span, or all others.

    The distances between blocks are those of a whole segment: what a token sees does not depend on how many come after it.
    """
    size = pattern.block or span.total
    for distance in pattern.distances(_up(span.length, span.rate * size) if pattern.block else 1):
        for signed in {distance} if pattern.causal else {distance, -distance}:
            causal = pattern.causal and distance == 0 and keys == span.held
            yield from _pairs(size, signed, span.held, keys, causal)


def _pairs(size: int, distance: int, queries: tuple[int, int], keys: tuple[int, int], causal: bool) -> Iterator[Step]:
    """Blocks of queries, or what is there of them, with the blocks of keys `distance` before them; whole ones in one step."""
    low = max(queries[0] // size, keys[0] // size + distance)
    high = min(_up(queries[1], size), _up(keys[1], size) + distance)
    first = max(_up(queries[0], size), _up(keys[0], size) + distance)
    last = max(first, min(queries[1] // size, keys[1] // size + distance))
    for number in range(low, min(first, high)):
        yield _pair(number, size, distance, queries, keys, causal)
    if first < last:
        query, key = first * size - queries[0], (first - distance) * size - keys[0]
        yield Step(query, key, size, size, last - first, causal)
    for number in range(last, high):
        yield _pair(number, size, distance, queries, keys, causal)


def _pair(block: int, size: int, distance: int, queries: tuple[int, int], keys: tuple[int, int], causal: bool) -> Step:
    ours, theirs = _common(block, size, queries), _common(block - distance, size, keys)
    return Step(ours.start - queries[0], theirs.start - keys[0], len(ours), len(theirs), 1, causal)


def _common(block: int, size: int, held: tuple[int, int]) -> range:
    return range(max(held[0], block * size), min(held[1], (block + 1) * size))


def _up(tokens: int, size: int) -> int:
    return -(-tokens // size)
