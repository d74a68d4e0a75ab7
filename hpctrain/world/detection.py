"""Finds out who this process is, from MPI, Slurm, torchrun or nothing; starts MPI only where a launcher set it up."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from hpctrain.contracts.identity import Identity, Source
from hpctrain.errors import EnvironmentUnfitError

_MPIRUN = ("OMPI_COMM_WORLD_SIZE", "PRTE_LAUNCHED", "MPI_LOCALNRANKS")
"""Set by the mpiexec of Open MPI 4, of Open MPI 5, and of MPICH, even where Slurm's variables describe only their proxies."""
_PMI = ("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMIX_RANK", "PMIX_NAMESPACE")
"""Set by whoever offers a process manager interface: mpiexec, and srun with --mpi=pmi2 or pmix."""


_TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
STARTER_VARIABLE = "HPCTRAIN_STARTED_IN"
"""Set by `hpctrain run -n` for ranks that it starts without MPI: its directory, which nobody else can look into."""


def detect(environment: Mapping[str, str] = os.environ) -> Identity:
    """This process's identity. Raises EnvironmentUnfitError when launcher and MPI library do not fit together."""
    tasks = slurm_step_tasks(environment)
    started_by_mpirun = any(name in environment for name in _MPIRUN)
    if started_by_mpirun or any(name in environment for name in _PMI):
        _shorten_addresses(environment)
        identity = _from_mpi()
        if identity is not None and (identity.size > 1 or (tasks <= 1 and _announced_size(environment) <= 1)):
            return identity
        if started_by_mpirun or tasks <= 1:
            _refuse_wrong_mpi(_announced_size(environment))
    if started_by_srun(environment):
        return _from_slurm(environment, tasks)
    if STARTER_VARIABLE in environment:
        return _from_torch_variables(environment, "starter")
    if environment.keys() >= _TORCHRUN:
        return _from_torch_variables(environment, "torchrun")
    return Identity()


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of its ranks."""
    names = (*_MPIRUN, *_PMI)
    return (
        slurm_step_tasks(environment) > 1
        or any(name in environment for name in names)
        or STARTER_VARIABLE in environment
        or environment.keys() >= _TORCHRUN
    )


def started_by_srun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started this process as one of several tasks, and not mpiexec or its proxies."""
    return slurm_step_tasks(environment) > 1 and not any(name in environment for name in _MPIRUN)


def slurm_step_tasks(environment: Mapping[str, str]) -> int:
    """Tasks of this srun step; 0 outside one. (SLURM_NTASKS will not do: a batch script has it without being a task.)"""
    return int(environment.get("SLURM_STEP_NUM_TASKS", 0)) if "SLURM_PROCID" in environment else 0


def fallback_notice(identity: Identity) -> str | None:
    """A notice for the user when srun gave the tasks no MPI; it is printed once."""
    if identity.source != "slurm":
        return None
    return (
        f"srun started {identity.size} tasks without an MPI that fits (each MPI process was alone), so the ranks meet "
        "through Slurm's variables and talk over gloo or NCCL. For MPI use `srun --mpi=pmi2` with MPICH or "
        "`srun --mpi=pmix` with Open MPI (`srun --mpi=list` shows what this Slurm has)."
    )


def _announced_size(environment: Mapping[str, str]) -> int:
    """The number of ranks that the launcher says it started."""
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    return max((int(environment[name]) for name in names if environment.get(name, "").isdigit()), default=1)


def _shorten_addresses(environment: Mapping[str, str]) -> None:
    """Choose libfabric over UCX for PyPI's MPICH under srun, unless the user has chosen.

    Over UCX it hands PMI its address and the memory behind it, 4 KB in all. If these bytes do not compress, a line is
    longer than the 1024 bytes that the pmi2 of Slurm 22.05 reads at once, and MPI_Init fails or hangs.
    """
    if started_by_srun(environment) and "PMI_FD" in environment and _installed("mpich"):
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ofi")


def _installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _from_mpi() -> Identity | None:
    """MPI's answer; None when there is no MPI library."""
    try:
        from hpctrain.mpi.library import MPI
    except EnvironmentUnfitError:
        return None
    world = MPI.COMM_WORLD
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    identity = Identity(world.rank, world.size, node.rank, node.size, socket.gethostname(), "mpi")
    node.Free()
    return identity


def _refuse_wrong_mpi(announced: int) -> None:
    try:
        from hpctrain.mpi.library import MPI

        library = MPI.Get_library_version().splitlines()[0].strip()
    except EnvironmentUnfitError as error:
        library = str(error)
    raise EnvironmentUnfitError(
        f"an MPI launcher started {announced} ranks, and mpi4py's MPI library sees one process alone: they are of two "
        f"different MPIs. mpi4py uses: {library}. Use that MPI's own mpiexec (hpctrain run -n does)"
    )


def _from_slurm(environment: Mapping[str, str], tasks: int) -> Identity:
    node_index = int(environment.get("SLURM_NODEID", 0))
    per_node = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(tasks)))
    return Identity(
        rank=int(environment["SLURM_PROCID"]),
        size=tasks,
        local_rank=int(environment.get("SLURM_LOCALID", 0)),
        local_size=per_node[node_index] if node_index < len(per_node) else 1,
        node=environment.get("SLURMD_NODENAME", socket.gethostname()),
        source="slurm",
    )


def _tasks_per_node(text: str) -> list[int]:
    """ "2(x3),1" -> [2, 2, 2, 1]"""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _from_torch_variables(environment: Mapping[str, str], source: Source) -> Identity:
    size = int(environment["WORLD_SIZE"])
    return Identity(
        rank=int(environment["RANK"]),
        size=size,
        local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
        local_size=int(environment.get("LOCAL_WORLD_SIZE", size)),
        source=source,
    )
