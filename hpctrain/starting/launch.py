"""Starts ranks on this machine: over hpctrain's PMI server, under MPI's own mpiexec, or without MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hpctrain.starting.mpi_library import ask_library
from hpctrain.starting.mpiexec import UnderMpiexec, find_mpiexec
from hpctrain.starting.processes import StartRank, over_pmi, spawn, without_mpi


class Launched(Protocol):
    """Running ranks, with the methods of subprocess.Popen."""

    @property
    def failed_rank(self) -> int | None:
        """The first rank that failed, if that is known."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def launch_over_mpi(
    command: Sequence[str], ranks: int, start: StartRank = spawn, front: Sequence[str] = ()
) -> Launched | None:
    """Ranks over MPI; None if mpi4py has no MPI library. EnvironmentUnfitError if no mpiexec fits the library.

    start: starts a rank where mpiexec does not. front: words in front of the command where mpiexec does.
    """
    library = ask_library()
    if library is None:
        return None
    if library.speaks_pmi:
        return over_pmi(command, ranks, start)
    return UnderMpiexec(find_mpiexec(library.flavour), [*front, *command], ranks)


def launch(
    command: Sequence[str], ranks: int, directory: Path, start: StartRank = spawn, front: Sequence[str] = ()
) -> Launched:
    """Ranks over MPI (`launch_over_mpi`) if it is installed, else over gloo: then they meet in `directory`."""
    launched = launch_over_mpi(command, ranks, start, front)
    if launched is not None:
        return launched
    print("hpctrain: no MPI is installed: the ranks talk over gloo", file=sys.stderr, flush=True)
    return without_mpi(command, ranks, directory, start)
