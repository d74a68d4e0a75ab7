"""The transports of an MPI whose ranks all share a node: memory. Imports nothing of hpctrain.

By default UCX, libfabric and Open MPI also open a port for each rank, and take messages from anybody who connects to it, some of
which write to the rank's memory. All of them read their variables in MPI_Init.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

_BY_MPIEXEC = (("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"), ("MPI_LOCALNRANKS", "PMI_SIZE"))
"""The ranks of this node and of the world, from Open MPI's mpiexec, and from MPICH's and its relatives'."""
_BY_SCHEDULER = (
    ("FLUX_JOB_NNODES", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("SLURM_STEP_NUM_NODES", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)
"""The number of nodes, what only a task has, and the number of tasks, from Flux and srun."""
_SHARED_MEMORY = {"UCX_TLS": "self,sm", "FI_PROVIDER": "shm", "OMPI_MCA_btl": "^tcp"}
_CHOSEN_BY = {
    "UCX_TLS": ("UCX_NET_DEVICES",),
    "FI_PROVIDER": ("MPIR_CVAR_OFI_USE_PROVIDER", "I_MPI_OFI_PROVIDER"),
    "OMPI_MCA_btl": (),
}
"""Other variables with which a user chooses the transport."""
ADDED = "HPCTRAIN_TRANSPORTS"
"""The names of the variables that the starter added, in its ranks' environment: each removes them after MPI_Init."""


def share_node(environment: Mapping[str, str]) -> bool:
    """Whether the launchers have told that all ranks are on this node. False if none has told anything.

    One launcher may run inside a task of another: it is unknown which of them started the ranks.
    """
    if "PALS_RANKID" in environment or "SLURM_HET_SIZE" in environment:  # these have ranks that the others don't count
        return False
    told = [
        (environment[here] == environment[everywhere], environment[everywhere])
        for here, everywhere in _BY_MPIEXEC
        if here in environment and everywhere in environment
    ]
    told += [
        (environment[nodes] == "1", environment.get(tasks, ""))
        for nodes, task, tasks in _BY_SCHEDULER
        if task in environment and nodes in environment
    ]
    sizes = {size for _, size in told}
    return bool(told) and all(one_node for one_node, _ in told) and environment.get("PMI_SIZE", told[0][1]) in sizes


def shared_memory(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables with which MPI opens no port, without those that the user has set or chosen otherwise."""
    chosen = {name for name, others in _CHOSEN_BY.items() if any(one in environment for one in (name, *others))}
    if any(Path("/dev").glob("cxi[0-9]*")):  # Cray MPICH accepts no other provider, and this one opens no port
        chosen.add("FI_PROVIDER")
    return {name: value for name, value in _SHARED_MEMORY.items() if name not in chosen}


def forget(environment: MutableMapping[str, str], added: Iterable[str] = ()) -> None:
    """Remove the variables in `added`, and those of the starter: MPI has read them, and other programs must not."""
    for name in (*added, *environment.pop(ADDED, "").split()):
        environment.pop(name, None)
