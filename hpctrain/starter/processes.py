"""Ranks without MPI: processes that find each other as torchrun's do, in a store that this process holds."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

_POLL = 0.05
_GRACE = 10.0
"""Seconds that the other ranks have to leave by themselves after one has failed."""


class Processes:
    """N ranks; behaves as the one process of an mpiexec would."""

    def __init__(self, command: list[str], ranks: int) -> None:
        # held here, on a port that the system picks: nothing to collide with
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(minutes=5))
        self._ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **self._environment(rank, ranks)},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            for rank in range(ranks)
        ]
        self._failed_at: float | None = None

    def _environment(self, rank: int, ranks: int) -> dict[str, str]:
        """torch's names for the rendezvous env://, with a store that somebody else holds."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }

    def poll(self) -> int | None:
        """None while a rank runs, then the first status that is not zero."""
        statuses = [rank.poll() for rank in self._ranks]
        if any(status is None for status in statuses):
            return None
        return next((status for status in statuses if status), 0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all ranks; when one fails, the others get a while to follow and are then ended."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            now = time.monotonic()
            if give_up is not None and now > give_up:
                raise subprocess.TimeoutExpired("ranks", timeout or 0)
            if self._failed_at is None and any(rank.poll() for rank in self._ranks):
                self._failed_at = now
            if self._failed_at is not None and now > self._failed_at + _GRACE:
                self.kill()
            time.sleep(_POLL)
        return status

    def kill(self) -> None:
        """End every rank that still runs."""
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)
