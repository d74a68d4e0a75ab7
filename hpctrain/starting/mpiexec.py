"""Ranks under the mpiexec that fits mpi4py's MPI library, for an MPI that does not speak PMI with the starter."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.starting.channel_streams import Heard
from hpctrain.starting.mpi_library import MPICH, OPEN_MPI
from hpctrain.starting.output_relay import Filter, Relay

__all__ = ["UnderMpiexec", "find_mpiexec"]


def ending_with_this_process() -> list[str]:
    """The words in front of a command that is to end when this process ends."""
    return [sys.executable, str(Path(__file__).with_name("with_parent.py")), str(os.getpid())]


@dataclass(frozen=True)
class Mpiexec:
    """A launcher and the MPI it belongs to."""

    path: Path
    flavour: str

    def command(self, ranks: int) -> list[str]:
        """The command line before the program."""
        return [str(self.path), "-n", str(ranks)]

    def environment(self, ranks: int) -> dict[str, str]:
        """Settings for Open MPI, which by default refuses root and more ranks than cores, and binds each rank to one core.

        Each setting has two names: version 4 reads OMPI_, version 5 PRTE_. MPICH needs no settings.
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
            settings["OMPI_MCA_mpi_yield_when_idle"] = "1"  # else waiting ranks take the cores from working ranks
        return settings


class UnderMpiexec:
    """A running mpiexec; its output is passed on until it ends."""

    def __init__(
        self,
        mpiexec: Mpiexec,
        command: Sequence[str],
        ranks: int,
        heard: Heard | None = None,
        ends: Filter | None = None,
    ) -> None:
        """heard: listens to ranks on several hosts, which no pipe of this process's reaches. mpiexec must then end with it.

        ends: listens on standard error to a program that stands in front of each rank and tells how it ended.
        """
        words = [*mpiexec.command(ranks), *command]
        if heard is not None:
            words = [*ending_with_this_process(), *words]
        self._process = subprocess.Popen(
            words,
            env={**mpiexec.environment(ranks), **os.environ, "COLUMNS": str(shutil.get_terminal_size().columns)},
            stdin=subprocess.DEVNULL if heard is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach the ranks through the starter: mpiexec would kill them
        )
        self._relay = Relay(self._process, heard, ends)

    failed_rank: int | None = None
    """Unknown: mpiexec does not tell."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, content: bytes) -> None:
        """Write to rank 0's standard input."""
        assert self._process.stdin is not None
        with suppress(OSError):  # mpiexec has ended
            self._process.stdin.write(content)
            self._process.stdin.flush()

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
    """The mpiexec of the MPI `library`, beside this Python or else on PATH.

    Raises EnvironmentUnfitError if there is none, or if it belongs to another MPI: each rank would be a job of its own.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise EnvironmentUnfitError(
            f"mpi4py uses {library}, but there is no mpiexec beside {sys.executable} or on PATH; "
            "load your site's MPI module, or pip install 'hpctrain[mpich]'"
        )
    flavour = launcher_flavour(Path(found))
    if flavour != library:
        raise EnvironmentUnfitError(
            f"{found} belongs to {flavour or 'an unknown MPI'}, but mpi4py uses {library}; expected both of one MPI: "
            f"put {library}'s mpiexec first on PATH, or install mpi4py for {flavour or 'the other'}"
        )
    return Mpiexec(Path(found), flavour)


def launcher_flavour(mpiexec: Path) -> str | None:
    """The MPI that `mpiexec` belongs to, from the output of `mpiexec --version`; None if unknown."""
    answer = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60)
    text = (answer.stdout + answer.stderr).lower()
    if "hydra" in text or "mpich" in text or "intel(r) mpi" in text:
        return MPICH
    return OPEN_MPI if any(word in text for word in ("open mpi", "openrte", "prrte", "open-mpi")) else None
