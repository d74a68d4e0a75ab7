"""Starts ranks on this machine: over hpctrain's PMI server, under the MPI's own mpiexec, or without MPI."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from hpctrain.starter.mpi_library import ask_library
from hpctrain.starter.mpiexec import UnderMpiexec, find_mpiexec
from hpctrain.starter.processes import over_pmi, without_mpi


class Launched(Protocol):
    """Running ranks, with the methods of subprocess.Popen."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def launch_over_mpi(command: Sequence[str], ranks: int) -> Launched | None:
    """None where mpi4py has no MPI library. EnvironmentUnfitError where no mpiexec fits it."""
    library = ask_library()
    if library is None:
        return None
    if library.speaks_pmi:
        return over_pmi(command, ranks)
    return UnderMpiexec(find_mpiexec(library.flavour), command, ranks)


def launch(command: Sequence[str], ranks: int, directory: Path) -> Launched:
    """Over MPI where there is one, else over gloo; the ranks then meet in `directory`."""
    launched = launch_over_mpi(command, ranks)
    if launched is not None:
        return launched
    print("hpctrain: no MPI is installed: the ranks talk over gloo", file=sys.stderr, flush=True)
    return without_mpi(command, ranks, directory)
