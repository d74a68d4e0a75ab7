"""Tells ranks that ran different blocks of a model whose parameters they gather together, as with LayerDrop."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

from hpctrain.mpi.errors import name_ranks
from hpctrain.ranks.meeting import World
from hpctrain.ranks.watchdog.position import Position

_SHOWN = 3
_ANSWERING = timedelta(seconds=2)
"""Other ranks whose communication has failed, too, answer at once."""


def parted(ran: Mapping[int, Sequence[str]]) -> str | None:
    """A sentence if ranks ran different blocks; None where one is only further than another. ran: `ShardedModel.ran` by rank."""
    first, *others = sorted(ran)
    other = next((rank for rank in others if any(a != b for a, b in zip(ran[first], ran[rank], strict=False))), None)
    if other is None:
        return None
    counts = {rank: Counter(filter(None, names)) for rank, names in ran.items()}
    most: Counter[str] = Counter()
    for one in counts.values():
        most |= one
    lacking = {rank: sorted(most - one) for rank, one in counts.items()}
    told = [f"{name_ranks([rank])} left out {_named(names)}" for rank, names in lacking.items() if names][:_SHOWN]
    place = next(place for place, (a, b) in enumerate(zip(ran[first], ran[other], strict=False)) if a != b)
    if not told:
        told = [f"rank {first} ran {ran[first][place]} where rank {other} ran {ran[other][place]}"]
    return (
        f"ranks ran different blocks of the model ({'; '.join(told)}), whose parameters they gather together; expected the same on "
        "all: let ranks draw alike what decides (LayerDrop: a generator with one seed), or use [sharding] stage 2"
    )


def _named(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def parted_in_failure(world: World, position: Position) -> str | None:
    """The sentence of `parted`, where communication has failed on this rank and on others."""
    mine = position.blocks()
    if not mine or world.identity.size == 1:
        return None
    keys = {f"ran/{rank}": rank for rank in range(world.identity.size)}
    try:
        world.tell("ran", mine)
        world.store.wait(list(keys), _ANSWERING)
    except RuntimeError:
        pass
    try:
        return parted({rank: json.loads(world.store.get(key)) for key, rank in keys.items() if world.store.check([key])})
    except RuntimeError:  # rank 0, which serves the store, has gone
        return None
