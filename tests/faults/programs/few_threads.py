"""An MPI that does not allow threads is refused."""

import mpi4py
import torch.distributed as dist

import hpctrain.mpi
from hpctrain.base.errors import EnvironmentUnfitError

mpi4py.rc.thread_level = "serialized"
from mpi4py import MPI  # noqa: E402

print(f"level {MPI.Query_thread() == MPI.THREAD_MULTIPLE}")
try:
    dist.init_process_group(hpctrain.mpi.BACKEND, init_method="mpi://")
except EnvironmentUnfitError as error:
    print(f"unfit: {error}")
