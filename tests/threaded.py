"""Many ranks in one process: a thread for each, with torch's own threaded process group for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _set_thread_isolation_mode
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

LIMIT = 60.0
"""Time limit for all ranks together, in seconds."""


def on_ranks(ranks: int, action: Callable[[int, dist.ProcessGroup], None]) -> None:
    """Run `action(rank, group)` on `ranks` threads; the first exception is raised here."""
    assert not dist.is_initialized()
    store, errors = HashStore(), list[BaseException]()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
        try:
            group = dist.group.WORLD
            assert group is not None
            action(rank, group)
        except BaseException as error:
            errors.append(error)
            ProcessLocalGroup.exception_handle(error)  # wakes the threads that wait for this one
        finally:
            dist.destroy_process_group()

    _set_thread_isolation_mode(True)
    _install_threaded_pg()
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not any(thread.is_alive() for thread in threads), "ranks wait for each other"
    finally:
        _uninstall_threaded_pg()
        _set_thread_isolation_mode(False)
    if errors:
        raise errors[0]
