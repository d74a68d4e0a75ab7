"""Written for torchrun: asks the environment who it is before anything is set up."""

import os

import torch.distributed as dist

import hpctrain.mpi

told = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]

dist.init_process_group("mpi4py", init_method="mpi://")
assert told == [dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size()], told
assert hpctrain.mpi.local_rank() == told[2]
os.environ.pop("LOCAL_RANK")
assert hpctrain.mpi.local_rank() == told[2], "MPI knows it, too"
print("as told", *told)
dist.destroy_process_group()
