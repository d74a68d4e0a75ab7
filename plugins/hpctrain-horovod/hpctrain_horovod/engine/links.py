"""The messages of a negotiation, which travel along a tree of the ranks."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, Protocol

from hpctrain_horovod.engine.request import Request

FAN_OUT = 16
"""Children of a rank in the tree: up to 17 ranks, each talks to rank 0 directly."""

END = "end"
"""The kind of a message after which no other follows; its content is the reason."""


class Links(Protocol):
    """Ordered messages between the ranks of a process set. One thread at a time uses them."""

    rank: int
    size: int

    def send(self, rank: int, message: bytes) -> None:
        """Send without waiting for the receiver."""

    def flush(self, rank: int) -> None:
        """Wait until all that was sent to `rank` has left this process. That rank must not wait for this one meanwhile."""

    def receive(self) -> tuple[int, bytes] | None:
        """The next message that has arrived, and its rank; None if there is none."""


def parent_of(rank: int) -> int | None:
    """The rank above `rank` in the tree; None for rank 0."""
    return None if rank == 0 else (rank - 1) // FAN_OUT


def children_of(rank: int, size: int) -> list[int]:
    """The ranks below `rank` in the tree."""
    return list(range(rank * FAN_OUT + 1, min((rank + 1) * FAN_OUT + 1, size)))


class Shorthand:
    """Numbers in place of requests that a rank has already sent to another: the steady state sends only numbers.

    The sender decides on every number and sends a definition with the first use, so the receiver never has to guess.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._numbers: OrderedDict[Request, int] = OrderedDict()

    def refer(self, request: Request) -> list[Any]:
        """[number] for a known request, [number, definition] for a new one; [-1, definition] without a cache."""
        number = self._numbers.get(request)
        if number is not None:
            self._numbers.move_to_end(request)
            return [number]
        if not self._capacity:
            return [-1, request]
        number = len(self._numbers)
        if number == self._capacity:
            number = self._numbers.popitem(last=False)[1]
        self._numbers[request] = number
        return [number, request]


class Longhand:
    """The receiver's side of Shorthand."""

    def __init__(self) -> None:
        self._requests: dict[int, Request] = {}

    def resolve(self, reference: list[Any]) -> Request:
        """The request that `refer` stood for."""
        if len(reference) == 1:
            return self._requests[reference[0]]
        request = Request.from_json(reference[1])
        self._requests[reference[0]] = request
        return request


def encode(kind: str, content: Any) -> bytes:
    """A message."""
    return json.dumps([kind, content], separators=(",", ":")).encode()


def decode(message: bytes) -> tuple[str, Any]:
    """The kind and the content of a message."""
    kind, content = json.loads(message)
    return kind, content
