"""The ranks call different operations. Usage: mismatch.py ELEMENTS memory|mpi

In a node's memory, and over MPI for large operations, the error comes at once. Small operations over MPI time out, and the error
says where each rank is.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import hpctrain.mpi

settings = hpctrain.mpi.Settings(shared_memory=sys.argv[2] == "memory")
dist.init_process_group("mpi4py", init_method="mpi://", timeout=timedelta(seconds=2), pg_options=settings)
tensor = torch.ones(int(sys.argv[1]))
try:
    if dist.get_rank() == 0:
        dist.all_reduce(tensor)
    else:
        dist.broadcast(tensor, 0)
        dist.barrier()
except hpctrain.mpi.OperationMismatchError as error:
    print(f"mismatch on rank {dist.get_rank()}: {error}", flush=True)
    dist.all_reduce(tensor)  # no data was moved, so the group still works
    print(f"afterwards {tensor[0].item()}", flush=True)
except hpctrain.mpi.CommunicationTimeoutError as error:
    print(f"timeout on rank {dist.get_rank()}: {error}", flush=True)
