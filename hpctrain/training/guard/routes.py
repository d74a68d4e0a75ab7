"""Tells ranks that ran different blocks of a model whose parameters they gather together, as with LayerDrop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

_SHOWN = 4


def parted(ran: Mapping[int, Sequence[str]]) -> str | None:
    """A sentence if ranks ran different blocks; None where one is only further than another. ran: `ShardedModel.ran` by rank."""
    first, *others = sorted(ran)
    pairs = [(rank, pair) for rank in others for pair in zip(ran[first], ran[rank], strict=False) if pair[0] != pair[1]]
    if not pairs:
        return None
    counts = {rank: Counter(filter(None, names)) for rank, names in ran.items()}
    most = reduce(or_, counts.values())
    lacking = {rank: ", ".join(sorted({*(most - one)})[:_SHOWN]) for rank, one in counts.items()}
    told = [f"rank {rank} left out {names}" for rank, names in lacking.items() if names]
    rank, (one, another) = pairs[0]
    told = told[:_SHOWN] or [f"rank {first} ran {one} where rank {rank} ran {another}"]
    return (
        f"ranks ran different blocks of the model ({'; '.join(told)}), whose parameters they gather together; expected the same on "
        "all: let ranks draw alike what decides (LayerDrop: a generator with one seed), or use [sharding] stage 2"
    )
