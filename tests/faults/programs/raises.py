"""One rank raises while the others wait in a collective. All must end at once."""

import sys

import torch
import torch.distributed as dist

import hpctrain.mpi  # noqa: F401

dist.init_process_group(sys.argv[1], init_method="mpi://")
if dist.get_rank() == 1:
    raise ZeroDivisionError("the reason")
dist.all_reduce(torch.ones(10))
