"""Starts ranks: here over hpctrain's PMI server, or under the mpiexec that fits the MPI library, here and on other hosts.

A program that starts ranks on several nodes by its own means gives each the variables of `started_variables`, and attends it
through a `ChannelDirectory`, with which the rank ends, too. It starts `hpctrain run JOB --started-by DIRECTORY`, or a program with
`hpctrain.run` or `hpctrain.own_loop`, which finds the directory in these variables. For ranks over MPI, a `PmiRelay` beside each
and one `PmiBoard` take the place of the variables.

Imports no torch.
"""

from hpctrain.base.launcher_variables import RankNumbers, launched, started_variables
from hpctrain.starting.channel_directory import ChannelDirectory, Ending, ending_in, sweep
from hpctrain.starting.hosts import HERE, Hosts, read_hostfile
from hpctrain.starting.mpi_library import ask_library
from hpctrain.starting.mpiexec import UnderMpiexec, find_mpiexec
from hpctrain.starting.placement import Counts, ask_counts
from hpctrain.starting.pmi import PmiBoard, PmiRelay
from hpctrain.starting.processes import Launched, over_pmi

__all__ = [
    "HERE",
    "ChannelDirectory",
    "Counts",
    "Ending",
    "Hosts",
    "Launched",
    "PmiBoard",
    "PmiRelay",
    "RankNumbers",
    "UnderMpiexec",
    "ask_counts",
    "ask_library",
    "ending_in",
    "find_mpiexec",
    "launched",
    "over_pmi",
    "read_hostfile",
    "started_variables",
    "sweep",
]
