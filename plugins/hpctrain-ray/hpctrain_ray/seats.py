"""The actors of ranks: one in each bundle of a placement group, numbered node by node."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hpctrain.base.launcher_variables import RankNumbers
from hpctrain.toolkit.commands import EnvironmentUnfitError
from hpctrain_ray.errors import first_line
from hpctrain_ray.order import Bundle
from hpctrain_ray.placement import Placed

_START = 120.0
"""Seconds for the actors of a start to begin: Ray starts a Python process for each, which imports hpctrain."""


class LostStartError(EnvironmentUnfitError):
    """An actor was lost, or was not there in time, before its rank has started: another start may do better."""


@dataclass(frozen=True)
class Node:
    """A node of the cluster: Ray's name for it, and its address."""

    id: str
    address: str


@dataclass(frozen=True)
class Seat:
    """The actor of a rank, with its node and resources."""

    actor: Any
    node: Node
    numbers: RankNumbers
    bundle: Bundle


def own_node() -> Node:
    """The node of this process."""
    import ray

    return Node(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address())


def take_seats(placed: Placed, kind: type, *arguments: Any) -> list[Seat]:
    """An actor of `kind` in each bundle, in the order of the ranks. Raises LostStartError if one does not start in time.

    kind: has a method `node`, which gives `own_node()`.
    """
    import ray

    actors: list[Any] = [
        ray.remote(kind).options(**_options(placed, index)).remote(*arguments) for index in range(len(placed.bundles))
    ]
    try:
        nodes: list[Node] = ray.get([one.node.remote() for one in actors], timeout=_START)
    except BaseException as error:
        end_actors(actors)
        if not isinstance(error, (ray.exceptions.RayError, TimeoutError)):
            raise
        raise LostStartError(
            f"the actors of {len(actors)} ranks did not all start within {_START:.0f} s ({first_line(error)}); expected "
            "hpctrain-ray, and the Python that is used here, on every node of the cluster"
        ) from None
    seats = map(Seat, actors, nodes, numbers_by_node(nodes), placed.bundles)
    return sorted(seats, key=lambda seat: seat.numbers.rank)


def end_actors(actors: Sequence[Any]) -> None:
    """End these actors' processes at once."""
    import ray

    for actor in actors:
        with suppress(ray.exceptions.RayError, ValueError):
            ray.kill(actor)


def _options(placed: Placed, index: int) -> dict[str, Any]:
    """The options of an actor in the bundle `index`, which takes all of it. It is never started again by itself."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = placed.bundles[index]
    return {
        "num_cpus": bundle.cpus,
        "num_gpus": bundle.gpus,
        "resources": dict(bundle.resources) or None,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(placed.group, placement_group_bundle_index=index),
        "max_restarts": 0,
    }


def numbers_by_node(nodes: Sequence[Node]) -> list[RankNumbers]:
    """The numbers of the ranks on these nodes: node by node, in the order in which the nodes come first."""
    names = [one.id for one in nodes]
    order = sorted(range(len(names)), key=lambda index: names.index(names[index]))
    local: dict[str, int] = {}
    found = {}
    for rank, index in enumerate(order):
        name = names[index]
        found[index] = RankNumbers(rank, len(names), local.get(name, 0), names.count(name))
        local[name] = local.get(name, 0) + 1
    return [found[index] for index in range(len(names))]
