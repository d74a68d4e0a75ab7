"""Ranks under the mpiexec that fits mpi4py's MPI library, for an MPI that does not take them from the starter itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import EnvironmentUnfitError
from hpctrain.starter.mpi_library import MPICH, OPEN_MPI
from hpctrain.starter.relay import Relay


@dataclass(frozen=True)
class Mpiexec:
    """A launcher and the MPI it belongs to."""

    path: Path
    flavour: str

    def command(self, ranks: int) -> list[str]:
        """The words before the program."""
        return [str(self.path), "-n", str(ranks)]

    def environment(self, ranks: int) -> dict[str, str]:
        """By default Open MPI refuses root and more ranks than cores, and binds each rank to one core.

        Both names of each setting: version 4 reads OMPI_, version 5 PRTE_. MPICH does none of it.
        """
        if self.flavour != OPEN_MPI:
            return {}
        settings = {
            "OMPI_MCA_rmaps_base_oversubscribe": "1",
            "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
            "OMPI_MCA_hwloc_base_binding_policy": "none",
            "PRTE_MCA_hwloc_default_binding_policy": "none",
        }
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        if ranks > (os.cpu_count() or 1):
            settings["OMPI_MCA_mpi_yield_when_idle"] = "1"  # else waiting ranks take the cores of working ones
        return settings


class UnderMpiexec:
    """A running mpiexec, whose output is passed on until it has ended."""

    def __init__(self, mpiexec: Mpiexec, command: Sequence[str], ranks: int) -> None:
        self._process = subprocess.Popen(
            [*mpiexec.command(ranks), *command],
            env={**os.environ, **mpiexec.environment(ranks), "COLUMNS": str(shutil.get_terminal_size().columns)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach the ranks from the starter, not make mpiexec kill them
        )
        self._relay = Relay(self._process)

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        status = self._process.wait(timeout)
        self._relay.finish()
        return status

    def kill(self) -> None:
        self._process.kill()
        self._relay.finish()


def find_mpiexec(library: str) -> Mpiexec:
    """The mpiexec of the MPI `library`: the one beside this Python, else the one on PATH.

    Raises EnvironmentUnfitError where there is none, or one of another MPI: its ranks would each be alone.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise EnvironmentUnfitError(
            f"mpi4py uses {library}, and there is no mpiexec beside {sys.executable} or on PATH; "
            "load your site's MPI module, or pip install 'hpctrain[mpich]'"
        )
    flavour = launcher_flavour(Path(found))
    if flavour != library:
        raise EnvironmentUnfitError(
            f"{found} is of {flavour or 'an unknown MPI'}, and mpi4py uses {library}; expected both of one MPI: "
            f"put {library}'s mpiexec first on PATH, or install mpi4py for {flavour or 'the other'}"
        )
    return Mpiexec(Path(found), flavour)


def launcher_flavour(mpiexec: Path) -> str | None:
    """From what `mpiexec --version` prints."""
    answer = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60)
    text = (answer.stdout + answer.stderr).lower()
    if "hydra" in text or "mpich" in text or "intel(r) mpi" in text:
        return MPICH
    return OPEN_MPI if any(word in text for word in ("open mpi", "openrte", "prrte", "open-mpi")) else None
