"""For a machine whose torch is older than hpctrain supports and can't be replaced: what hpctrain uses of torch 2.13 and 2.11 lacks.

run.sh has every Python process import it there, and says so: what such a run finds is of hpctrain with that torch.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

LACKING = {
    # under these names they are what the others were
    (dist, "all_gather_single"): lambda: dist.all_gather_into_tensor,
    (dist, "reduce_scatter_single"): lambda: dist.reduce_scatter_tensor,
    # only ranks that use different parameters need it
    (FSDPModule, "set_reduce_scatter_unused_params"): lambda: _do_nothing,
}


def _do_nothing(*given: Any, **named: Any) -> None:
    pass


for (owner, name), make in LACKING.items():
    if not hasattr(owner, name):
        setattr(owner, name, make())
