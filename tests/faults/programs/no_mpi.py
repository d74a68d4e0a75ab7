"""Importing the package must not start MPI; asking for a group without an MPI library gives one clear error."""

import sys

import torch.distributed as dist

import hpctrain.mpi
from hpctrain.errors import EnvironmentUnfitError

assert "mpi4py.MPI" not in sys.modules
sys.modules["mpi4py.MPI"] = None  # what an import that cannot find libmpi amounts to
try:
    dist.init_process_group(hpctrain.mpi.BACKEND, init_method="mpi://")
except EnvironmentUnfitError as error:
    print(f"unfit: {error}")
