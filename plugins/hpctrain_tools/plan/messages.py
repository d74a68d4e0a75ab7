"""Objects that planned ranks tell each other, as pipeline stages tell their shapes: between processes, since tensors are empty."""

from __future__ import annotations

import queue
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch.distributed as dist

from hpctrain.base.errors import EnvironmentUnfitError

# seconds to wait for another rank
_PATIENCE = 300.0


class Queue(Protocol):
    """The messages to one rank, of multiprocessing."""

    def put(self, message: tuple[int, list[Any]]) -> None:
        """Send; the message begins with its sender."""

    def get(self, block: bool, timeout: float) -> tuple[int, list[Any]]:
        """The next one. Raises queue.Empty."""


@contextmanager
def messages_over(queues: Mapping[int, Queue]) -> Iterator[None]:
    """Let torch's functions that send and receive lists of objects use each rank's queue. For a process that plans one rank."""
    waiting: defaultdict[int, deque[list[Any]]] = defaultdict(deque)
    before = dist.send_object_list, dist.recv_object_list

    def send(objects: list[Any], dst: int | None = None, group: Any = None, *_: Any, **named: Any) -> None:
        queues[_of_all(dst, group, named.get("group_dst"))].put((dist.get_rank(), objects))

    def receive(objects: list[Any], src: int | None = None, group: Any = None, *_: Any, **named: Any) -> int:
        of = _of_all(src, group, named.get("group_src"))
        while not waiting[of]:
            try:
                sender, message = queues[dist.get_rank()].get(True, _PATIENCE)
            except queue.Empty:
                raise EnvironmentUnfitError(
                    f"rank {dist.get_rank()} waits for rank {of}, which has told it nothing for {_PATIENCE:g} s"
                ) from None
            waiting[sender].append(message)
        objects[:] = waiting[of].popleft()
        return of

    dist.send_object_list, dist.recv_object_list = send, receive  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.send_object_list, dist.recv_object_list = before


def _of_all(rank: int | None, group: Any, in_group: int | None) -> int:
    """A rank among all, of which a caller gives that number or the one in the group."""
    if rank is not None:
        return rank
    assert in_group is not None
    return dist.get_global_rank(group, in_group)
