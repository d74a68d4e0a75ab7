"""The last rank never enters the all_reduce; the others must name it and still be able to leave."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import hpctrain.mpi

LIMIT = 2

# what: "sync", "async", "wait" (a limit given to Work.wait), "future" or "barrier"; elements
what, elements = sys.argv[1], int(sys.argv[2])
dist.init_process_group("mpi4py", init_method="mpi://", timeout=timedelta(seconds=30 if what == "wait" else LIMIT))
rank, size = dist.get_rank(), dist.get_world_size()
dist.all_reduce(torch.ones(10))
if rank == size - 1:
    time.sleep(40)
    sys.exit("the others should have ended this rank")
if rank == 1:
    time.sleep(LIMIT / 4)  # enters late: it must not be named
start = time.perf_counter()
try:
    tensor = torch.ones(elements)
    if what == "sync":
        dist.all_reduce(tensor)
    elif what == "async":
        dist.all_reduce(tensor, async_op=True).wait()
    elif what == "wait":
        dist.all_reduce(tensor, async_op=True).wait(timedelta(seconds=LIMIT))
    elif what == "future":
        dist.all_reduce(tensor, async_op=True).get_future().wait()
    elif what == "barrier":
        dist.barrier()
except Exception as error:
    known = isinstance(error, hpctrain.mpi.CommunicationTimeoutError) or what == "future"
    print(f"caught {known} on rank {rank} after {time.perf_counter() - start:.1f} s: {error}", flush=True)
    if rank == 1:
        time.sleep(10)  # leaves last: rank 0 ends it
else:
    print("no error", flush=True)
