"""Rank 0 waits for a message that rank 1 never sends."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

import hpctrain.mpi

dist.init_process_group("mpi4py", init_method="mpi://", timeout=timedelta(seconds=2))
if dist.get_rank() == 1:
    time.sleep(30)
else:
    try:
        dist.recv(torch.ones(3), 1, tag=7)
    except hpctrain.mpi.CommunicationTimeoutError as error:
        print(f"caught {error}", flush=True)
