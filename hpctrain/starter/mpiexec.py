"""The mpiexec that fits mpi4py's MPI library, and what each MPI needs to start ranks on one machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import EnvironmentUnfitError

_MPICH, _OPEN_MPI = "MPICH", "Open MPI"


@dataclass(frozen=True)
class Mpiexec:
    """A launcher and the MPI it belongs to."""

    path: Path
    flavour: str

    def command(self, ranks: int) -> list[str]:
        """The words before the program."""
        return [str(self.path), "-n", str(ranks)]

    def environment(self, ranks: int) -> dict[str, str]:
        """Open MPI refuses root and more ranks than cores, and binds each rank to one core, unless it is told.

        Both names of each setting: version 4 reads OMPI_, version 5 PRTE_. MPICH does none of it.
        """
        if self.flavour != _OPEN_MPI:
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


def find_mpiexec() -> Mpiexec | None:
    """The mpiexec beside this Python, else the one on PATH; None where mpi4py has no MPI library.

    Raises EnvironmentUnfitError for one of another MPI than mpi4py's library: its ranks would each be alone.
    """
    library = library_flavour()
    if library is None:
        return None
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


def library_flavour() -> str | None:
    """The MPI that mpi4py loads, asked in a process of its own: this one must not start MPI before its ranks do."""
    ask = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=60)
    if answer.returncode:
        return None
    name = answer.stdout.strip()
    return _OPEN_MPI if name == _OPEN_MPI else _MPICH  # MPICH's relatives (Intel, Cray, MVAPICH) share its launcher


def launcher_flavour(mpiexec: Path) -> str | None:
    """From what `mpiexec --version` prints."""
    answer = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60)
    text = (answer.stdout + answer.stderr).lower()
    if "hydra" in text or "mpich" in text or "intel(r) mpi" in text:
        return _MPICH
    return _OPEN_MPI if any(word in text for word in ("open mpi", "openrte", "prrte", "open-mpi")) else None
