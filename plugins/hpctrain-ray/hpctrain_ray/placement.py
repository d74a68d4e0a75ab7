"""Finds room for the ranks: a placement group of Ray's, with a time limit, and of fewer ranks where the job allows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.starting.placement import Counts
from hpctrain.toolkit.commands import EnvironmentUnfitError
from hpctrain_ray.order import Bundle, Order, first_of, listed

_TRIAL = 10.0
"""Seconds for which a number of ranks is tried before a smaller one."""
_PROBE = 2.0
"""Seconds for which room beside running ranks is tried."""
_POLL, _LOOK = 0.5, 0.1
"""Seconds between two tries, and between two looks at one."""
_PATIENCE = 3.0
"""Seconds of waiting that nobody is told about."""
_FORGET = 5.0
"""Seconds for Ray to give the resources of a group back."""


@dataclass(frozen=True)
class Placed:
    """A placement group with a bundle for each rank."""

    group: Any
    bundles: Sequence[Bundle]

    def remove(self) -> None:
        """Give the resources back; what runs there ends."""
        import ray

        ray.util.remove_placement_group(self.group)
        until = time.monotonic() + _FORGET
        while _state(self.group) != "REMOVED" and time.monotonic() < until:
            time.sleep(_POLL)


def place(
    order: Order, ask: Callable[[int, int], Counts], stopped: Callable[[], bool], say: Callable[[str], None]
) -> Placed | None:
    """Room for the ranks of `order`, or for fewer; None if `stopped` says so meanwhile.

    ask: which numbers of ranks from one to another fit the job. Raises UsageError, and EnvironmentUnfitError if there is no room in
    time.
    """
    until, wanted, told = time.monotonic() + order.placement_limit, len(order.bundles), False
    while True:
        for count in _numbers(order, ask):
            bundles, left = first_of(order.bundles, count), until - time.monotonic()
            if order.least is not None and not _can_ever_fit(bundles) and left > _POLL:
                continue
            placed = _try(bundles, order, min(left, left if order.least is None else _TRIAL), stopped, say, told)
            told = True
            if placed is not None:
                if count < wanted:
                    say(f"{count} of {wanted} ranks start: the cluster has no room for more now: {_of_cluster()}")
                return placed
            if stopped():
                return None
        if time.monotonic() >= until:
            raise EnvironmentUnfitError(_why_not(order))
        time.sleep(_POLL)


def has_room(bundles: Sequence[Bundle], order: Order) -> bool:
    """Whether the cluster has room for these ranks now, beside those that run."""
    import ray

    if not _within(bundles, ray.available_resources()):
        return False
    placed = _try(bundles, order, _PROBE, lambda: False, lambda text: None, told=True)  # sums say nothing of the nodes
    if placed is not None:
        placed.remove()
    return placed is not None


def _numbers(order: Order, ask: Callable[[int, int], Counts]) -> list[int]:
    """The numbers of ranks to try, the largest first."""
    wanted = len(order.bundles)
    if order.least is None or order.least >= wanted:
        return [wanted]
    return [wanted, *ask(order.least, wanted - 1).fits]


def _try(
    bundles: Sequence[Bundle],
    order: Order,
    seconds: float,
    stopped: Callable[[], bool],
    say: Callable[[str], None],
    told: bool,
) -> Placed | None:
    """A group of these bundles, if there is room within `seconds`. told: whether the user knows that the job waits."""
    import ray

    group = ray.util.placement_group([one.as_ray() for one in bundles], strategy=order.strategy)
    placed, begin = Placed(group, bundles), time.monotonic()
    try:
        while _state(group) != "CREATED":
            if not told and time.monotonic() > begin + _PATIENCE:
                told = True
                say(f"waiting up to {order.placement_limit:g} s for {_asked(bundles, order)}; {_of_cluster()}")
            if stopped() or time.monotonic() >= begin + seconds:
                placed.remove()
                return None
            time.sleep(_LOOK)
    except BaseException:
        placed.remove()
        raise
    return placed


def _state(group: Any) -> str:
    import ray

    return str(ray.util.placement_group_table(group).get("state", "REMOVED"))


def _can_ever_fit(bundles: Sequence[Bundle]) -> bool:
    import ray

    return _within(bundles, ray.cluster_resources())


def _within(bundles: Sequence[Bundle], there: dict[str, float]) -> bool:
    names = {name for one in bundles for name in one.as_ray()}
    return all(sum(one.as_ray().get(name, 0.0) for one in bundles) <= there.get(name, 0.0) + 1e-6 for name in names)


def _asked(bundles: Sequence[Bundle], order: Order) -> str:
    return f"{listed(bundles)} with strategy {order.strategy}"


def _of_cluster() -> str:
    """The resources of the cluster's nodes in words."""
    import ray

    free = ray.available_resources()
    alive = [one for one in ray.nodes() if one["Alive"]]
    total: dict[str, float] = {}
    for one in alive:
        for name, amount in one["Resources"].items():
            total[name] = total.get(name, 0.0) + amount
    shown = [name for name in total if not name.startswith(("node:", "memory", "object_store", "accelerator_type"))]
    amounts = ", ".join(f"{free.get(name, 0.0):g} of {total[name]:g} {name} free" for name in sorted(shown))
    return f"the cluster has {len(alive)} node{'s' * (len(alive) != 1)} with {amounts or 'nothing'}"


def _why_not(order: Order) -> str:
    fewer = "" if order.least is None else f", nor for fewer ranks down to [elastic] min_ranks = {order.least}"
    return (
        f"found no room on the Ray cluster within {order.placement_limit:g} s for {_asked(order.bundles, order)}{fewer}; "
        f"{_of_cluster()}; ask for less, add nodes, or raise [scheduler.ray] placement_limit"
    )
