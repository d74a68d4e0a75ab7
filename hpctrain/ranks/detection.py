"""Detects this process's rank from MPI, Slurm or torchrun. Starts MPI only where a launcher has set it up."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import distributions
from typing import NoReturn

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.launcher_variables import (
    STARTER_VARIABLE,
    announced_size,
    by_flux,
    by_mpi,
    by_mpirun,
    by_srun,
    by_torchrun,
    has_torchrun_variables,
    launcher_name,
    pmi_name,
    slurm_numbers,
    started_tasks,
    torchrun_numbers,
)
from hpctrain.contracts.identity import Identity


def detect(environment: Mapping[str, str] = os.environ) -> Identity:
    """This process's identity. Raises EnvironmentUnfitError when launcher and MPI library do not fit together."""
    if by_torchrun(environment):
        return Identity(*torchrun_numbers(environment), source="torchrun")
    tasks, flux = started_tasks(environment), by_flux(environment)
    mpirun = not flux and by_mpirun(environment)
    if mpirun or by_mpi(environment):
        _shorten_addresses(environment)
        identity = _from_mpi()
        if identity is not None and (identity.size > 1 or (tasks <= 1 and announced_size(environment) <= 1)):
            return identity
        if mpirun or (tasks <= 1 and not flux):
            _refuse_wrong_mpi(environment)
    if flux and tasks > 1:
        _refuse_wrong_mpi(environment)
    if by_srun(environment):
        return Identity(*slurm_numbers(environment), environment.get("SLURMD_NODENAME", socket.gethostname()), "slurm")
    if STARTER_VARIABLE in environment:
        return Identity(*torchrun_numbers(environment), source="starter")
    if has_torchrun_variables(environment):
        return Identity(*torchrun_numbers(environment), source="torchrun")
    return Identity()


@contextmanager
def torchrun_variables(identity: Identity) -> Iterator[None]:
    """Set what torchrun sets, for code of the user's that asks the environment; afterwards the environment is as before."""
    told = {
        "RANK": identity.rank, "WORLD_SIZE": identity.size,
        "LOCAL_RANK": identity.local_rank, "LOCAL_WORLD_SIZE": identity.local_size,
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in told}
    os.environ.update({name: str(value) for name, value in told.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)  # the user's code may have removed it
            else:
                os.environ[name] = value


def fallback_notice(identity: Identity) -> str | None:
    """A notice for the user when srun started the tasks without MPI; printed once."""
    if identity.source == "slurm":
        return (
            f"srun started {identity.size} tasks without an MPI that fits (each MPI process was alone), so the ranks meet "
            "through Slurm's variables and talk over gloo or NCCL. For MPI use `srun --mpi=pmi2` with MPICH or "
            "`srun --mpi=pmix` with Open MPI (`srun --mpi=list` shows what this Slurm has)."
        )
    return None


def _shorten_addresses(environment: Mapping[str, str]) -> None:
    """Choose libfabric over UCX for PyPI's MPICH under srun, unless the user has chosen.

    Over UCX, MPICH publishes 4 KB through PMI: its address and the memory behind it. If these bytes do not compress, a line
    exceeds the 1024 bytes that the pmi2 of Slurm 22.05 reads at once, and MPI_Init fails or hangs.
    """
    if by_srun(environment) and pmi_name(environment) == "PMI" and any(distributions(name="mpich")):
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")


def _from_mpi() -> Identity | None:
    """MPI's answer; None when there is no MPI library."""
    try:
        from hpctrain.mpi.library import MPI
    except EnvironmentUnfitError:
        return None
    ranks = MPI.COMM_WORLD
    node = ranks.Split_type(MPI.COMM_TYPE_SHARED)
    identity = Identity(ranks.rank, ranks.size, node.rank, node.size, socket.gethostname(), "mpi")
    node.Free()
    return identity


def _refuse_wrong_mpi(environment: Mapping[str, str]) -> NoReturn:
    try:
        from hpctrain.mpi.library import MPI

        library = MPI.Get_library_version().splitlines()[0].strip()
    except EnvironmentUnfitError as error:
        library = str(error)
    raise EnvironmentUnfitError(
        f"{launcher_name(environment) or 'an MPI launcher'} started several ranks, but mpi4py's MPI library sees only one process: "
        f"launcher and library belong to different MPIs. mpi4py uses: {library}. Use that MPI's own mpiexec (hpctrain run -n "
        "does), build mpi4py with the launcher's MPI (MPICC=... pip install --no-binary=mpi4py mpi4py), or start one torchrun on "
        "each node"
    )
