"""Ranks that the starter launches itself: over MPI with its own PMI server, or without MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.starter.pmi import PmiServer
from hpctrain.world.detection import STARTER_VARIABLE

_POLL = 0.05
_GRACE = 10.0
"""Seconds that the other ranks have to exit by themselves after one has failed: they notice its closed connections."""
_GRACE_OF_MPI = 1.0
"""Like _GRACE, for ranks under MPI, which do not notice the failure of another rank."""


class Processes:
    """N ranks with the interface of a single mpiexec process."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        descriptors: Sequence[tuple[int, ...]] | None = None,
        grace: float = _GRACE,
    ) -> None:
        """Start a rank for each of `environments`, added to this process's, with its `descriptors`, if any."""
        self._grace = grace
        self._ranks = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment},
                pass_fds=descriptors[rank] if descriptors else (),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must reach the ranks from the starter only
            )
            for rank, environment in enumerate(environments)
        ]
        self._failed_at: float | None = None
        self.failed_rank: int | None = None

    def poll(self) -> int | None:
        """None while a rank runs, then the first status that is not zero, or 0."""
        statuses = [rank.poll() for rank in self._ranks]
        if any(status is None for status in statuses):
            return None
        return next((status for status in statuses if status), 0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all ranks. When one fails, the others have a grace period to exit and are then killed."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            now = time.monotonic()
            if give_up is not None and now > give_up:
                raise subprocess.TimeoutExpired("ranks", timeout or 0)
            if self._failed_at is None:
                self.failed_rank = next((number for number, rank in enumerate(self._ranks) if rank.poll()), None)
                self._failed_at = None if self.failed_rank is None else now
            if self._failed_at is not None and now > self._failed_at + self._grace:
                self.kill()
            time.sleep(_POLL)
        return status

    def kill(self) -> None:
        """Kill every rank that still runs."""
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(signal.SIGKILL)


def without_mpi(command: Sequence[str], ranks: int, directory: Path) -> Processes:
    """Ranks that find each other and their secret in `directory`, and their rank in torchrun's variables."""
    return Processes(
        command,
        [
            {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                STARTER_VARIABLE: str(directory),
            }
            for rank in range(ranks)
        ],
    )


def over_pmi(command: Sequence[str], ranks: int) -> Processes:
    """Ranks whose MPI library asks hpctrain's PMI server for their rank."""
    server = PmiServer(ranks)
    environments = [server.environment(rank) for rank in range(ranks)]
    descriptors = [server.descriptors(rank) for rank in range(ranks)]
    started = Processes(command, environments, descriptors, _GRACE_OF_MPI)
    server.started()
    return started
