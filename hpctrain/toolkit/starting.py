"""Starts ranks: here over hpctrain's PMI server, or under the mpiexec that fits the MPI library, here and on other hosts.

Imports no torch.
"""

from hpctrain.base.launcher_variables import launched
from hpctrain.starting.hosts import HERE, Hosts, read_hostfile
from hpctrain.starting.mpi_library import ask_library
from hpctrain.starting.mpiexec import UnderMpiexec, find_mpiexec
from hpctrain.starting.processes import Launched, over_pmi

__all__ = [
    "HERE",
    "Hosts",
    "Launched",
    "UnderMpiexec",
    "ask_library",
    "find_mpiexec",
    "launched",
    "over_pmi",
    "read_hostfile",
]
