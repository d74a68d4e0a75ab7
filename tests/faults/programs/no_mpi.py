"""Importing the package must not start MPI. Creating a group without an MPI library gives one clear error."""

import sys

import torch.distributed as dist

import hpctrain.mpi
from hpctrain.base.errors import EnvironmentUnfitError

assert "mpi4py.MPI" not in sys.modules
sys.modules["mpi4py.MPI"] = None  # as if the import could not find libmpi
try:
    dist.init_process_group(hpctrain.mpi.BACKEND, init_method="mpi://")
except EnvironmentUnfitError as error:
    print(f"unfit: {error}")
