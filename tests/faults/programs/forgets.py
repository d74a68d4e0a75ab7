"""Neither waits for its last operations nor destroys the groups. Still ends with status 0, and its messages arrive."""

import torch
import torch.distributed as dist

import hpctrain.mpi  # noqa: F401

dist.init_process_group("mpi4py", init_method="mpi://")
group = dist.new_group()
rank = dist.get_rank()
dist.all_reduce(torch.ones(10), group=group)
dist.all_reduce(torch.ones(1_000_000), async_op=True)
if rank == 0:
    dist.isend(torch.ones(1_000_000), 1)
elif rank == 1:
    received = torch.zeros(1_000_000)
    dist.recv(received, 0)
    print(f"received {received.sum().item():.0f}", flush=True)
