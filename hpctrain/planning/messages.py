"""Objects that planned ranks tell each other, as pipeline stages tell their shapes: over files, since their tensors are empty."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_PATIENCE = timedelta(minutes=5)


@contextmanager
def messages_over(directory: Path) -> Iterator[None]:
    """Let torch's functions that send and receive lists of objects use `directory`. For a process that plans one rank."""
    store, sent, received = dist.FileStore(str(directory / "messages"), -1), Counter[int](), Counter[int]()
    store.set_timeout(_PATIENCE)
    before = dist.send_object_list, dist.recv_object_list

    def send(objects: list[Any], dst: int | None = None, group: Any = None, *_: Any, group_dst: int | None = None, **__: Any) -> None:
        to = dist.get_global_rank(group, group_dst) if dst is None and group_dst is not None else dst
        assert to is not None  # one of both is given
        store.set(f"{dist.get_rank()} to {to}: {sent[to]}", pickle.dumps(objects))
        sent[to] += 1

    def receive(objects: list[Any], src: int | None = None, group: Any = None, *_: Any, group_src: int | None = None, **__: Any) -> int:
        of = dist.get_global_rank(group, group_src) if src is None and group_src is not None else src
        assert of is not None
        objects[:] = pickle.loads(store.get(f"{of} to {dist.get_rank()}: {received[of]}"))  # noqa: S301 - of this program
        received[of] += 1
        return of

    dist.send_object_list, dist.recv_object_list = send, receive  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.send_object_list, dist.recv_object_list = before
