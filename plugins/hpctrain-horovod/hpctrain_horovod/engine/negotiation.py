"""Agrees with the other ranks of a process set on which operations run next, and in which order.

The ranks form a tree. A rank tells its parent of an operation as soon as it and all ranks below it have submitted it.
Rank 0 then tells all ranks to run it; what it says first runs first, everywhere. An idle rank has nothing to do: without its
own submission no operation can be complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpctrain_horovod.engine.links import END, Links, Longhand, Shorthand, children_of, decode, encode, parent_of
from hpctrain_horovod.engine.request import ALLREDUCE, BARRIER, JOIN, Key, Request, mismatch, title

_ASK, _GO, _JOINED, _END = "ask", "go", "joined", END


@dataclass(slots=True)
class Agreed:
    """An operation that all ranks have submitted.

    values: what each rank said of its own (the first dim of an allgather), by rank; of a join, the last rank and the highest
    number of all. error: why it cannot run.
    """

    request: Request
    number: int
    values: dict[int, Any] = field(default_factory=dict)
    error: str | None = None

    @property
    def key(self) -> Key:
        return self.request.kind, self.request.name, self.number


@dataclass(slots=True)
class _Waiting:
    """An operation that some of this rank and its children have submitted."""

    first: tuple[int, Request]
    number: int
    sources: set[int] = field(default_factory=set)
    values: dict[int, Any] = field(default_factory=dict)
    error: str | None = None


class Negotiation:
    """A rank's part of the negotiation. One thread at a time uses it."""

    def __init__(self, links: Links, cache_capacity: int) -> None:
        self.ended: str | None = None
        """Why no operation can follow: a rank has shut down."""
        self.rank = links.rank
        self._links = links
        self._parent, self._children = parent_of(links.rank), children_of(links.rank, links.size)
        self._shorthand = {rank: Shorthand(cache_capacity) for rank in self._neighbours}
        self._longhand = {rank: Longhand() for rank in self._neighbours}
        self._waiting: dict[Key, _Waiting] = {}
        self._complete: list[Agreed] = []
        self._joined: dict[int, tuple[int, int]] = {}
        """This rank, or a child with all ranks below it -> the last of them to join, and their highest number."""

    @property
    def _neighbours(self) -> list[int]:
        return self._children if self._parent is None else [self._parent, *self._children]

    def submit(self, request: Request, number: int, value: Any) -> None:
        """This rank's own submission. value: what only it can say, such as the first dim of an allgather; of a join, its number."""
        if request.kind == JOIN:
            self._join(self.rank, self.rank, value)
        else:
            self._add(self.rank, request, number, {} if value is None else {self.rank: value}, None)

    def end(self, reason: str) -> None:
        """Tell all ranks that no operation can follow."""
        self._pass_on(reason, self.rank)

    def progress(self) -> list[Agreed]:
        """Read and send what there is, until operations are agreed. Returns those to run now, in order; none if there are none.

        The caller runs them before the next call. So a rank that is told of an operation waits in no later one: the message
        reaches it, and no two ranks wait for each other.
        """
        while (message := self._links.receive()) is not None:
            source, (kind, content) = message[0], decode(message[1])
            if kind == _ASK:
                for item in content:
                    one = _unpacked(item, self._longhand[source])
                    self._add(source, one.request, one.number, one.values, one.error)
            elif kind == _GO:
                together = [_unpacked(item, self._longhand[source]) for item in content]
                self._pass_up()
                self._announce(together)
                return together
            elif kind == _JOINED:
                self._join(source, *content)
            else:
                self._pass_on(content, source)
        if self.ended is not None:  # some ranks take part in nothing any more
            self._complete.clear()
            return []
        if self._parent is not None:
            self._pass_up()
            return []
        together, self._complete = self._complete, []
        self._announce(together)
        return together

    def _pass_up(self) -> None:
        if self._parent is not None and self._complete:
            together, self._complete = self._complete, []
            self._send(self._parent, _ASK, together)

    def _add(self, source: int, request: Request, number: int, values: dict[int, Any], error: str | None) -> None:
        key = request.kind, request.name, number
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = _Waiting((source, request), number)
        waiting.error = waiting.error or error or mismatch(key, waiting.first, (source, request))
        waiting.sources.add(source)
        waiting.values.update(values)
        self._look_at(key)

    def _look_at(self, key: Key) -> None:
        """Whether an operation is complete here, now that a rank has submitted it or has joined."""
        waiting = self._waiting[key]
        here = waiting.sources.union(self._joined) if self._joined else waiting.sources
        if len(here) < 1 + len(self._children):
            return
        del self._waiting[key]
        if self._joined and key[0] not in (ALLREDUCE, BARRIER):
            waiting.error = f"{title(key)} is not possible while rank {next(iter(self._joined))} has joined"
        self._complete.append(Agreed(waiting.first[1], waiting.number, waiting.values, waiting.error))

    def _join(self, source: int, last: int, highest: int) -> None:
        self._joined[source] = last, highest
        for key in list(self._waiting):
            self._look_at(key)
        if len(self._joined) < 1 + len(self._children):
            return
        highest = max(highest for _, highest in self._joined.values())
        if self._parent is None:
            self._complete.append(Agreed(Request(JOIN), -1, {0: [last, highest]}))
        else:
            self._pass_up()  # first what the ranks below have submitted
            self._links.send(self._parent, encode(_JOINED, [last, highest]))

    def _announce(self, together: list[Agreed]) -> None:
        if not together:
            return
        for child in self._children:
            self._send(child, _GO, together)
        for child in self._children:
            # the operation that follows may wait for the child in a node's memory, where nothing drives MPI
            self._links.flush(child)
        if any(one.request.kind == JOIN for one in together):
            self._joined.clear()

    def _pass_on(self, reason: str, source: int) -> None:
        if self.ended is None:
            self.ended = reason
            for rank in self._neighbours:
                if rank != source:
                    self._links.send(rank, encode(_END, reason))

    def _send(self, rank: int, kind: str, together: list[Agreed]) -> None:
        self._links.send(rank, encode(kind, list(_packed(together, self._shorthand[rank]))))


def _packed(together: list[Agreed], shorthand: Shorthand) -> Iterator[int | list[Any]]:
    """A number for what the steady state asks for, a known request by name; a list for all else."""
    for one in together:
        reference = shorthand.refer(one.request)
        if len(reference) == 1 and one.number == -1 and not one.values and one.error is None:
            yield reference[0]
        else:
            yield [reference, one.number, list(one.values.items()), one.error]


def _unpacked(item: int | list[Any], longhand: Longhand) -> Agreed:
    if isinstance(item, int):
        return Agreed(longhand.resolve([item]), -1)
    reference, number, values, error = item
    return Agreed(longhand.resolve(reference), number, dict(values), error)
