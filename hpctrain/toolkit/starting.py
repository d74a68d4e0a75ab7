"""Starts ranks: here over hpctrain's PMI server, or under the mpiexec that fits the MPI library, here and on other hosts.

Imports no torch.
"""

from hpctrain.starter.hosts import HERE, Hosts, read_hostfile
from hpctrain.starter.launch import Launched
from hpctrain.starter.mpi_library import ask_library
from hpctrain.starter.mpiexec import UnderMpiexec, find_mpiexec
from hpctrain.starter.processes import over_pmi
from hpctrain.world.detection import launched

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
