"""The clock of each rank against rank 0's, measured in the job."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from hpctrain.api import broadcast_value

_ROUNDS = 32


def clock_offset() -> tuple[int, int]:
    """How much later this rank's clock is than rank 0's, and the largest error of that, both in ns. Collective over all ranks.

    A sum over all ranks ends nowhere before it has begun everywhere. So each round gives a bound on both sides: this rank began
    before rank 0 ended, and ended after rank 0 began. All ranks measure at once, over any backend.
    """
    token = torch.zeros(1)
    mine = []
    for _ in range(_ROUNDS):
        begin = time.time_ns()
        dist.all_reduce(token)
        mine.append((begin, time.time_ns()))
    first = broadcast_value(mine)
    low = max(begin - end for (begin, _), (_, end) in zip(mine, first, strict=True))
    high = min(end - begin for (_, end), (begin, _) in zip(mine, first, strict=True))
    return (low + high) // 2, abs(high - low) // 2
