"""Detects this process's rank from MPI, Slurm, Flux or torchrun. Starts MPI only where a launcher has set it up."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.contracts.identity import Identity, LaunchSource

_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "PRTE_LAUNCHED")
_MPIRUN = (*_OPEN_MPI, "MPI_LOCALNRANKS")
"""Set by the mpiexec of Open MPI 4, Open MPI 5 and MPICH. Under Slurm, Slurm's own variables may describe only their proxies."""
_PMI = ("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMIX_RANK", "PMIX_NAMESPACE")
"""Set by launchers with a process management interface: mpiexec, Flux, and srun with --mpi=pmi2 or pmix."""
_PALS = "PALS_RANKID"
"""Set by PALS, the mpiexec of PBS on Cray and HPE machines, which may set none of the variables above."""
_FLUX = {"FLUX_TASK_RANK": "PMI_RANK", "FLUX_JOB_SIZE": "PMI_SIZE"}
"""Set by Flux, with the names under which its PMI says the same. An mpiexec in a task of Flux sets other values for its ranks."""
_AGENT = "TORCHELASTIC_RUN_ID"
"""Set by torchrun, which srun or mpiexec may have started."""
_TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
STARTER_VARIABLE = "HPCTRAIN_STARTED_IN"
"""Set by `hpctrain run -n` for ranks that it starts without MPI: the starter's directory, which other users cannot read."""


def detect(environment: Mapping[str, str] = os.environ) -> Identity:
    """This process's identity. Raises EnvironmentUnfitError when launcher and MPI library do not fit together."""
    if started_by_torchrun(environment):
        return _from_torch_variables(environment, "torchrun")
    tasks, by_flux = _tasks(environment), started_by_flux(environment)
    started_by_mpirun = not by_flux and any(name in environment for name in _MPIRUN)
    if started_by_mpirun or any(name in environment for name in (*_PMI, _PALS)):
        _shorten_addresses(environment)
        identity = _from_mpi()
        if identity is not None and (identity.size > 1 or (tasks <= 1 and _announced_size(environment) <= 1)):
            return identity
        if started_by_mpirun or (tasks <= 1 and not by_flux):
            _refuse_wrong_mpi(environment)
    if by_flux:
        return _from_flux()
    if started_by_srun(environment):
        return _from_slurm(environment, tasks)
    if STARTER_VARIABLE in environment:
        return _from_torch_variables(environment, "starter")
    if environment.keys() >= _TORCHRUN:
        return _from_torch_variables(environment, "torchrun")
    return Identity()


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of its ranks."""
    names = (*_MPIRUN, *_PMI, _PALS, STARTER_VARIABLE)
    return _tasks(environment) > 1 or any(name in environment for name in names) or environment.keys() >= _TORCHRUN


def launcher_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """The launcher of this process as users call it, if its variables tell."""
    if started_by_torchrun(environment):
        return "torchrun"
    if started_by_flux(environment):
        return "Flux"
    if _PALS in environment:
        return "PALS"
    return "srun" if started_by_srun(environment) else None


def started_by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process. srun or mpiexec may have started torchrun, once on each node."""
    return _AGENT in environment and environment.keys() >= _TORCHRUN


def started_by_flux(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether Flux started this process as a task, and not an mpiexec in a task of Flux."""
    if not environment.keys() >= _FLUX.keys() or any(name in environment for name in _OPEN_MPI):
        return False
    return all(environment.get(pmi, environment[flux]) == environment[flux] for flux, pmi in _FLUX.items())


def started_by_srun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started this process as one of several tasks, and not mpiexec or its proxies, Flux or torchrun."""
    inner = started_by_torchrun(environment) or started_by_flux(environment)
    return not inner and slurm_step_tasks(environment) > 1 and not any(name in environment for name in _MPIRUN)


def _tasks(environment: Mapping[str, str]) -> int:
    """Tasks of this Flux job or srun step; 0 outside. Flux may run in a Slurm job, whose variables its tasks still have."""
    return _number(environment, "FLUX_JOB_SIZE") if started_by_flux(environment) else slurm_step_tasks(environment)


def slurm_step_tasks(environment: Mapping[str, str]) -> int:
    """Tasks of this srun step; 0 outside a step. (Not SLURM_NTASKS: a batch script has it, too, and is no task.)"""
    return int(environment.get("SLURM_STEP_NUM_TASKS", 0)) if "SLURM_PROCID" in environment else 0


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
    """A notice for the user when srun or Flux started the tasks without MPI; printed once."""
    if identity.source == "slurm":
        return (
            f"srun started {identity.size} tasks without an MPI that fits (each MPI process was alone), so the ranks meet "
            "through Slurm's variables and talk over gloo or NCCL. For MPI use `srun --mpi=pmi2` with MPICH or "
            "`srun --mpi=pmix` with Open MPI (`srun --mpi=list` shows what this Slurm has)."
        )
    if identity.source == "flux":
        return (
            f"Flux started {identity.size} tasks without an MPI that fits (each MPI process was alone), so the ranks meet "
            "through Flux's PMI and talk over gloo or NCCL. For MPI use MPICH, which speaks PMI (pip install 'hpctrain[mpich]'), "
            "or Open MPI with `flux run -o pmi=pmix`."
        )
    return None


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else 0


def _announced_size(environment: Mapping[str, str]) -> int:
    """The number of ranks that the launcher announces. PALS may tell a rank only its own number."""
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE")
    told = max(_number(environment, name) for name in names)
    return max(told, _number(environment, _PALS) + 1)


def _shorten_addresses(environment: Mapping[str, str]) -> None:
    """Choose libfabric over UCX for PyPI's MPICH under srun, unless the user has chosen.

    Over UCX, MPICH publishes 4 KB through PMI: its address and the memory behind it. If these bytes do not compress, a line
    exceeds the 1024 bytes that the pmi2 of Slurm 22.05 reads at once, and MPI_Init fails or hangs.
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
        from hpctrain.mpi.numbering import number_by_node, world
    except EnvironmentUnfitError:
        return None
    renumbered = number_by_node()
    ranks = world()
    node = ranks.Split_type(MPI.COMM_TYPE_SHARED, ranks.rank)
    identity = Identity(ranks.rank, ranks.size, node.rank, node.size, socket.gethostname(), "mpi", renumbered)
    node.Free()
    return identity


def _refuse_wrong_mpi(environment: Mapping[str, str]) -> None:
    try:
        from hpctrain.mpi.library import MPI

        library = MPI.Get_library_version().splitlines()[0].strip()
    except EnvironmentUnfitError as error:
        library = str(error)
    by, remedy = "an MPI launcher", "Use that MPI's own mpiexec (hpctrain run -n does)"
    if _PALS in environment:
        by = "PALS"
        remedy = (
            "PALS fits Cray MPICH: load its module and build mpi4py with it (MPICC=cc pip install --no-binary=mpi4py "
            "mpi4py); or start one torchrun on each node"
        )
    several = _announced_size(environment)
    found = f"{several} or more" if _PALS in environment and "PMI_SIZE" not in environment else f"{several}"
    raise EnvironmentUnfitError(
        f"{by} started {found} ranks, but mpi4py's MPI library sees only one process: launcher and library "
        f"belong to different MPIs. mpi4py uses: {library}. {remedy}"
    )


def _from_flux() -> Identity:
    from hpctrain.ranks.pmi import launcher_pmi

    pmi = launcher_pmi()
    nodes = pmi.exchange(socket.gethostname())
    node = nodes[pmi.rank]
    by_node = sorted(range(pmi.size), key=lambda rank: nodes.index(nodes[rank]))
    rank, renumbered = by_node.index(pmi.rank), by_node != list(range(pmi.size))
    return Identity(rank, pmi.size, nodes[: pmi.rank].count(node), nodes.count(node), node, "flux", renumbered)


def _from_slurm(environment: Mapping[str, str], tasks: int) -> Identity:
    node_index = int(environment.get("SLURM_NODEID", 0))
    per_node = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(tasks)))
    local_rank = int(environment.get("SLURM_LOCALID", 0))
    # of a heterogeneous step, Slurm tells the tasks of one component
    known = node_index < len(per_node) and sum(per_node) == tasks and "SLURM_HET_SIZE" not in environment
    several = len(per_node) > 1 and max(per_node) > 1  # else srun says "cyclic" by itself
    in_turn = environment.get("SLURM_DISTRIBUTION", "").startswith(("cyclic", "plane", "arbitrary"))
    return Identity(
        rank=sum(per_node[:node_index]) + local_rank if known else int(environment["SLURM_PROCID"]),
        size=tasks,
        local_rank=local_rank,
        local_size=per_node[node_index] if node_index < len(per_node) else 1,
        node=environment.get("SLURMD_NODENAME", socket.gethostname()),
        source="slurm",
        renumbered=known and several and in_turn,
    )


def _tasks_per_node(text: str) -> list[int]:
    """ "2(x3),1" -> [2, 2, 2, 1]"""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _from_torch_variables(environment: Mapping[str, str], source: LaunchSource) -> Identity:
    size = int(environment["WORLD_SIZE"])
    return Identity(
        rank=int(environment["RANK"]),
        size=size,
        local_rank=int(environment.get("LOCAL_RANK", environment["RANK"])),
        local_size=int(environment.get("LOCAL_WORLD_SIZE", size)),
        source=source,
    )
