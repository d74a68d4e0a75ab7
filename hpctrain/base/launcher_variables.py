"""The variables of launchers: who has started this process, and as which of its ranks.

Imports nothing of hpctrain.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

__all__ = ["RankNumbers", "job_id", "launched", "set_variables", "started_variables"]

_OPEN_MPI = ("OMPI_COMM_WORLD_SIZE", "PRTE_LAUNCHED")
# set by the mpiexec of Open MPI 4, Open MPI 5 and MPICH. Under Slurm, Slurm's own variables may describe only their proxies.
_MPIRUN = (*_OPEN_MPI, "MPI_LOCALNRANKS")
# set by launchers with a process management interface: mpiexec, Flux, and srun with --mpi=pmi2 or pmix
_PMI = ("PMI_RANK", "PMI_SIZE", "PMI_FD", "PMIX_RANK", "PMIX_NAMESPACE")
# set by PALS, the mpiexec of PBS on Cray and HPE machines, which may set none of the variables above
_PALS = "PALS_RANKID"
# set by Flux, with the names under which its PMI says the same. An mpiexec in a task of Flux sets other values for its ranks.
_FLUX = {"FLUX_TASK_RANK": "PMI_RANK", "FLUX_JOB_SIZE": "PMI_SIZE"}
# set by torchrun, which srun or mpiexec may have started
_AGENT = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_TORCHRUN = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
TYPED = "--typed"
"""The option with which a starter tells its ranks the command that was typed."""
STARTER_VARIABLE = "HPCTRAIN_STARTED_IN"
"""Set by a starter for ranks that it starts without MPI, as `hpctrain run -n` does: a directory that other users cannot read."""
TORCHRUN_NAMES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID", "FLUX_TASK_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE", "SLURM_STEP_NUM_TASKS"),
    "LOCAL_RANK": (
        "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID",
    ),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}  # fmt: skip
"""torchrun's variables, each with those of Open MPI's mpiexec, MPICH's, PALS, Flux and srun, in the order in which they are asked:
mpiexec may run inside srun."""
# beginnings of variables by which a rank finds out how it was started
_OF_LAUNCHERS = (
    *TORCHRUN_NAMES, "PMI_", "MPI_LOCAL", STARTER_VARIABLE, "OMPI_COMM_WORLD_", "PMIX_", "PRTE_LAUNCHED", "MASTER_ADDR",
    "MASTER_PORT", "SLURM_", "FLUX_", "PALS_", "TORCHELASTIC_",
)  # fmt: skip
# variables that are true of every process in a job of Slurm's, whoever started it: the job's number, and when it ends
_OF_ALLOCATION = ("SLURM_JOB_ID", "SLURM_JOB_END_TIME")
# the ranks of this node and of the world, from Open MPI's mpiexec, and from MPICH's and its relatives'
_BY_MPIEXEC = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("MPI_LOCALNRANKS", "PMI_SIZE"))
# the number of nodes, what only a task has, and the number of tasks, from Flux and srun
_BY_SCHEDULER = (
    ("FLUX_JOB_NNODES", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("SLURM_STEP_NUM_NODES", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)

# set by schedulers. Flux comes last: it may run in a job of the others.
_JOB_IDS = ("SLURM_JOB_ID", "PBS_JOBID", "FLUX_JOB_ID")


class RankNumbers(NamedTuple):
    """The numbers of a rank, as variables tell them."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def set_variables(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torchrun's variables that a launcher has told under another name, for scripts that read them; what is set stays."""
    in_step = "SLURM_STEP_NUM_TASKS" in environment  # a batch script has some of srun's variables without being a task
    for name, others in TORCHRUN_NAMES.items():
        known = (other for other in others if other in environment and (in_step or not other.startswith("SLURM_")))
        value = next((environment[other] for other in known), None)
        if value is not None:
            environment.setdefault(name, value)


def started_variables(
    numbers: RankNumbers, directory: os.PathLike[str], host: str, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """The environment of a rank that a program on its node starts: `environment` with these numbers in place of other launchers'.

    directory: private, with the job's secret in the file `secret`; its name up to the last dot is the same for all ranks, and used
    for one start only. host: the address of rank 0's node.
    """
    return {
        **without_launchers(environment),
        **{name: str(number) for name, number in zip(TORCHRUN_NAMES, numbers, strict=True)},
        "MASTER_ADDR": host,
        STARTER_VARIABLE: os.fspath(directory),
    }


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables by which another launcher has told this process its rank."""
    return {
        name: value
        for name, value in environment.items()
        if name in _OF_ALLOCATION or not name.startswith(_OF_LAUNCHERS)
    }


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of its ranks."""
    return started_tasks(environment) > 1 or any(
        (
            has_torchrun_variables(environment),
            by_mpirun(environment),
            by_mpi(environment),
            STARTER_VARIABLE in environment,
        )
    )


def launcher_name(environment: Mapping[str, str] = os.environ) -> str | None:
    """The launcher of this process as users call it, if its variables tell."""
    if by_torchrun(environment):
        return "torchrun"
    if by_flux(environment):
        return "Flux"
    if _PALS in environment:
        return "PALS"
    return "srun" if by_srun(environment) else None


def by_torchrun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun started this process. srun or mpiexec may have started torchrun, once on each node."""
    return _AGENT[0] in environment and has_torchrun_variables(environment)


def has_torchrun_variables(environment: Mapping[str, str]) -> bool:
    """Whether somebody has set torchrun's variables: torchrun, a script, or `set_variables` with a master's address."""
    return environment.keys() >= _TORCHRUN


def by_flux(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether Flux started this process as a task, and not an mpiexec in a task of Flux."""
    if not environment.keys() >= _FLUX.keys() or any(name in environment for name in _OPEN_MPI):
        return False
    return all(environment.get(pmi, environment[flux]) == environment[flux] for flux, pmi in _FLUX.items())


def by_srun(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started this process as one of several tasks, and not mpiexec or its proxies, Flux or torchrun."""
    inner = by_torchrun(environment) or by_flux(environment) or by_mpirun(environment)
    return not inner and _step_tasks(environment) > 1


def by_mpirun(environment: Mapping[str, str]) -> bool:
    """Whether the mpiexec of Open MPI or MPICH started this process."""
    return any(name in environment for name in _MPIRUN)


def by_mpi(environment: Mapping[str, str]) -> bool:
    """Whether the launcher of this process speaks with MPI libraries."""
    return any(name in environment for name in (_PALS, *_PMI))


def pmi_name(environment: Mapping[str, str]) -> str | None:
    """The interface through which an MPI library finds its ranks: PMI or PMIx; None for a launcher's own way."""
    names = {"PMIX_NAMESPACE": "PMIx", "PMI_FD": "PMI", "PMI_PORT": "PMI", "PMI_RANK": "PMI"}
    return next((name for variable, name in names.items() if variable in environment), None)


def pmi_descriptor(environment: Mapping[str, str] = os.environ) -> int | None:
    """The descriptor on which MPICH's mpiexec, or the starter, serves PMI-1. (Slurm's speaks PMI-2.)"""
    number = environment.get("PMI_FD", "")
    return int(number) if "MPI_LOCALNRANKS" in environment and number.isdigit() else None


def mpiexec_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank under mpiexec, before MPI starts; 0 if nothing tells it."""
    names = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
    return next((int(environment[name]) for name in names if name in environment), 0)


def started_tasks(environment: Mapping[str, str]) -> int:
    """Tasks of this Flux job or srun step; 0 outside. Flux may run in a Slurm job, whose variables its tasks still have."""
    return _number(environment, "FLUX_JOB_SIZE") if by_flux(environment) else _step_tasks(environment)


def announced_size(environment: Mapping[str, str]) -> int:
    """The number of ranks that the launcher announces. PALS may tell a rank only its own number."""
    announced = max(_number(environment, name) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE"))
    return max(announced, _number(environment, _PALS) + 1)


def share_node(environment: Mapping[str, str]) -> bool:
    """Whether the launchers have told that all ranks are on this node. False if none has told anything.

    One launcher may run inside a task of another: it is unknown which of them started the ranks.
    """
    if _PALS in environment or "SLURM_HET_SIZE" in environment:  # these have ranks that the others don't count
        return False
    claims = [
        (environment[here] == environment[everywhere], environment[everywhere])
        for here, everywhere in _BY_MPIEXEC
        if here in environment and everywhere in environment
    ]
    claims += [
        (environment[nodes] == "1", environment.get(tasks, ""))
        for nodes, task, tasks in _BY_SCHEDULER
        if task in environment and nodes in environment
    ]
    sizes = {size for _, size in claims}
    return (
        bool(claims) and all(one_node for one_node, _ in claims) and environment.get("PMI_SIZE", claims[0][1]) in sizes
    )


def torchrun_numbers(environment: Mapping[str, str]) -> RankNumbers:
    """The rank's numbers from torchrun's variables."""
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return RankNumbers(
        rank, size, int(environment.get("LOCAL_RANK", rank)), int(environment.get("LOCAL_WORLD_SIZE", size))
    )


def torchrun_token(environment: Mapping[str, str]) -> str:
    """A name for this start of torchrun's job."""
    return ".".join(["torchrun", *(environment.get(name, "0") for name in (*_AGENT, "MASTER_ADDR", "MASTER_PORT"))])


def slurm_numbers(environment: Mapping[str, str]) -> RankNumbers:
    """The rank's numbers in a step of srun."""
    size, node = _step_tasks(environment), int(environment.get("SLURM_NODEID", 0))
    per_node = _tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    # of a heterogeneous step, Slurm tells the tasks of one component
    local_size = per_node[node] if node < len(per_node) else 1
    return RankNumbers(int(environment["SLURM_PROCID"]), size, int(environment.get("SLURM_LOCALID", 0)), local_size)


def slurm_allocation_tasks(environment: Mapping[str, str]) -> int:
    """The tasks of the Slurm job in whose allocation this process runs, as one of them or not; 0 outside."""
    return _number(environment, "SLURM_NTASKS") if "SLURM_JOB_ID" in environment else 0


def job_id(environment: Mapping[str, str] = os.environ) -> str | None:
    """The number of this job of Slurm, PBS or Flux; None outside."""
    return next((environment[name] for name in _JOB_IDS if environment.get(name)), None)


def step_host(environment: Mapping[str, str] = os.environ) -> str:
    """The host of the first task of this srun step."""
    return first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "localhost")))


def first_host(nodelist: str) -> str:
    """ "node[03-07,9],other1" -> "node03"; the first task runs there."""
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def step_token(environment: Mapping[str, str] = os.environ) -> str:
    """A name for this start of the step. A requeued job keeps its number, but remains of its first start must not answer."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(["slurm", *(environment.get(name, "0") for name in names)])


def _step_tasks(environment: Mapping[str, str]) -> int:
    """Tasks of this srun step; 0 outside a step. (Not SLURM_NTASKS: a batch script has it, too, and is no task.)"""
    return int(environment.get("SLURM_STEP_NUM_TASKS", 0)) if "SLURM_PROCID" in environment else 0


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdigit() else 0


def _tasks_per_node(text: str) -> list[int]:
    """ "2(x3),1" -> [2, 2, 2, 1]"""
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts
