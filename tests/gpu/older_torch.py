"""For a machine with torch 2.11 that can't be replaced: adds the parts of torch 2.13 that hpctrain uses.

There, run.sh makes every Python process import this file, and says so: such a run tests hpctrain with that torch.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

LACKING = {
    # new names of old functions
    (dist, "all_gather_single"): lambda: dist.all_gather_into_tensor,
    (dist, "reduce_scatter_single"): lambda: dist.reduce_scatter_tensor,
    # only ranks that use different parameters need it
    (FSDPModule, "set_reduce_scatter_unused_params"): lambda: _do_nothing,
    (FSDPModule, "reset_iter_state"): lambda: _reshard,
}


def _reshard(module: nn.Module) -> None:
    """Give back what a forward without a backward leaves gathered. It must have come to its end."""
    for one in module.modules():
        if isinstance(one, FSDPModule):
            one.reshard()


def _do_nothing(*given: Any, **named: Any) -> None:
    pass


for (owner, name), make in LACKING.items():
    if not hasattr(owner, name):
        setattr(owner, name, make())
