"""Starts ranks on this machine: over hpctrain's PMI server, under MPI's own mpiexec, or without MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from hpctrain.base.launcher_variables import STARTER_VARIABLE
from hpctrain_tools.launch.mpi_library import ask_library
from hpctrain_tools.launch.mpiexec import UnderMpiexec, ending_with_this_process, find_mpiexec
from hpctrain_tools.launch.pmi import PmiServer

__all__ = ["Launched", "over_pmi"]

_POLL = 0.05
# seconds that the other ranks have to exit by themselves after one has failed: they notice its closed connections
_GRACE = 10.0
# the grace of ranks under MPI, which do not notice the failure of another rank
_GRACE_OF_MPI = 1.0
_SHARED_MEMORY = Path("/dev/shm")
# seconds within which ranks of a job open its shared memory
_OPENING = 600.0
# the status of a rank that leaves with exit code 0 while the others wait for it
_LEFT_EARLY = 1


class Rank(Protocol):
    """A running rank, with methods of subprocess.Popen."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


StartRank = Callable[[Sequence[str], Mapping[str, str], Sequence[int]], Rank]
"""Starts a command with more variables than this process's, and with descriptors."""


def spawn(command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> Rank:
    """A rank that is started anew."""
    return subprocess.Popen(
        command,
        env={**os.environ, **environment},
        pass_fds=descriptors,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C must reach the ranks from the starter only
    )


def spawn_with_parent(command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> Rank:
    """A rank that is started anew, and ended when this process ends."""
    return spawn([*ending_with_this_process(), *command], environment, descriptors)


class Processes:
    """N ranks with the interface of a single mpiexec process."""

    def __init__(
        self,
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        descriptors: Sequence[tuple[int, ...]] | None = None,
        grace: float = _GRACE,
        left: Sequence[int] = (),
        start: StartRank = spawn,
        notice: bool = True,
    ) -> None:
        """Start a rank for each of `environments`, added to this process's, with its `descriptors`, if any.

        left: gets the ranks that leave too early; they have failed even if their exit code is 0. notice: whether the others
        notice the end of a rank that is killed.
        """
        self._grace, self._left, self._notice = grace, left, notice
        self._ranks = [
            start(command, environment, descriptors[rank] if descriptors else ())
            for rank, environment in enumerate(environments)
        ]
        self._failed_at: float | None = None
        self.failed_rank: int | None = None
        self.failed_status = 0
        """How it ended; 0 if it has left too early."""

    def poll(self) -> int | None:
        """None while a rank runs, then 0 if all have ended well, else the status of the first rank that failed."""
        statuses = [rank.poll() for rank in self._ranks]
        if any(status is None for status in statuses):
            return None
        if not any(statuses):
            return 0  # also where ranks end without MPI_Finalize, as all have got by
        self._look_for_failure()
        return self.failed_status or _LEFT_EARLY

    def wait(self, timeout: float | None = None) -> int:
        """Wait for all ranks. When one fails, the others have a grace period to exit and are then killed."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            now = time.monotonic()
            if give_up is not None and now > give_up:
                raise subprocess.TimeoutExpired("ranks", timeout or 0)
            self._look_for_failure()
            if self._failed_at is not None and now > self._failed_at + self._patience:
                self.kill()
            time.sleep(_POLL)
        return status

    @property
    def _patience(self) -> float:
        """The grace period after the failure: a rank that was killed has told the others nothing."""
        return self._grace if self._notice or self.failed_status != -signal.SIGKILL else 0.0

    def _look_for_failure(self) -> None:
        if self._failed_at is None:
            for number, rank in enumerate(self._ranks):
                status = rank.poll()
                if status or (status is not None and number in self._left):
                    self.failed_rank, self.failed_status, self._failed_at = number, status, time.monotonic()
                    return

    def kill(self) -> None:
        """Kill every rank that still runs."""
        for rank in self._ranks:
            if rank.poll() is None:
                rank.kill()


def without_mpi(command: Sequence[str], ranks: int, directory: Path, start: StartRank = spawn) -> Processes:
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
        start=start,
    )


def sweep_memory(directory: Path = _SHARED_MEMORY) -> None:
    """Remove the memory of MPICH's ranks that were killed, which a node keeps until it is started anew."""
    left = [path for path in directory.glob("mpich_shm_*") if _is_left(path)]
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with suppress(OSError):  # another user's process, or one that has ended
            mapped += maps.read_text(errors="replace")
    for path in left:
        if str(path) not in mapped:
            with suppress(OSError):
                path.unlink()


def _is_left(path: Path) -> bool:
    """Whether all ranks of the job that has made it have opened it, if they still run."""
    with suppress(OSError):
        found = path.lstat()
        return found.st_uid == os.geteuid() and time.time() - found.st_mtime > _OPENING
    return False


def over_pmi(command: Sequence[str], ranks: int, start: StartRank = spawn) -> Processes:
    """Ranks whose MPI library asks hpctrain's PMI server for their rank."""
    sweep_memory()
    server = PmiServer(ranks)
    environments = [server.environment(rank) for rank in range(ranks)]
    descriptors = [server.descriptors(rank) for rank in range(ranks)]
    started = Processes(command, environments, descriptors, _GRACE_OF_MPI, server.left, start, notice=False)
    server.started()
    return started


class Launched(Protocol):
    """Running ranks, with the methods of subprocess.Popen."""

    @property
    def failed_rank(self) -> int | None:
        """The first rank that failed, if that is known."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def launch_over_mpi(command: Sequence[str], ranks: int, start: StartRank = spawn) -> Launched | None:
    """Ranks over MPI; None if mpi4py has no MPI library. EnvironmentUnfitError if no mpiexec fits the library.

    start: starts a rank where mpiexec does not.
    """
    library = ask_library()
    if library is None:
        return None
    if library.speaks_pmi:
        return over_pmi(command, ranks, start)
    return UnderMpiexec(find_mpiexec(library.flavour), command, ranks)


def launch(command: Sequence[str], ranks: int, directory: Path, start: StartRank = spawn) -> Launched:
    """Ranks over MPI (`launch_over_mpi`) if it is installed, else over gloo: then they meet in `directory`."""
    launched = launch_over_mpi(command, ranks, start)
    if launched is not None:
        return launched
    named = os.environ.get("MPI4PY_LIBMPI")
    why = f"MPI4PY_LIBMPI names {named}, which can't be loaded" if named else "no MPI is installed"
    print(f"hpctrain: {why}: the ranks talk over gloo", file=sys.stderr, flush=True)
    return without_mpi(command, ranks, directory, start)
