"""The transports of an MPI whose ranks all share a node: memory. Imports nothing of hpctrain.

By default UCX, libfabric and Open MPI also open a port for each rank, and take messages from anybody who connects to it, some of
which write to the rank's memory. All of them read their variables in MPI_Init.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

_SHARED_MEMORY = {"UCX_TLS": "self,sm", "FI_PROVIDER": "shm", "OMPI_MCA_btl": "^tcp"}
# other variables with which a user chooses the transport
_CHOSEN_BY = {
    "UCX_TLS": ("UCX_NET_DEVICES",),
    "FI_PROVIDER": ("MPIR_CVAR_OFI_USE_PROVIDER", "I_MPI_OFI_PROVIDER"),
    "OMPI_MCA_btl": (),
}
ADDED = "HPCTRAIN_TRANSPORTS"
"""The names of the variables that the starter added, in its ranks' environment: each removes them after MPI_Init."""


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
