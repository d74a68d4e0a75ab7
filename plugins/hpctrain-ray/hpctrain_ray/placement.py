"""Finds room for the ranks: a placement group of Ray's, with a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.toolkit.commands import EnvironmentUnfitError
from hpctrain_ray.order import Bundle, Order, listed

_LOOK = 0.1
"""Seconds between two looks at a group."""
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
            time.sleep(_LOOK)


def place(order: Order, stopped: Callable[[], bool], say: Callable[[str], None]) -> Placed | None:
    """Room for the ranks of `order`; None if `stopped` says so meanwhile. Raises EnvironmentUnfitError if there is no room in
    time."""
    import ray

    group = ray.util.placement_group([one.as_ray() for one in order.bundles], strategy=order.strategy)
    placed, begin, told = Placed(group, order.bundles), time.monotonic(), False
    try:
        while _state(group) != "CREATED":
            seconds = time.monotonic() - begin
            if not told and seconds > _PATIENCE:
                told = True
                say(f"waiting up to {order.placement_limit:g} s for {_asked(order)}; {_of_cluster()}")
            if stopped():
                placed.remove()
                return None
            if seconds >= order.placement_limit:
                raise EnvironmentUnfitError(
                    f"found no room on the Ray cluster within {order.placement_limit:g} s for {_asked(order)}; {_of_cluster()}; "
                    "ask for less, add nodes, or raise [scheduler.ray] placement_limit"
                )
            time.sleep(_LOOK)
    except BaseException:
        placed.remove()
        raise
    return placed


def _state(group: Any) -> str:
    import ray

    return str(ray.util.placement_group_table(group).get("state", "REMOVED"))


def _asked(order: Order) -> str:
    return f"{listed(order.bundles)} with strategy {order.strategy}"


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
