"""Groups inside and between nodes, by the ranks of a group that share a node. Needs no MPI: the world's names of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from hpctrain.ranks.json_collectives import gather_values


@dataclass(frozen=True)
class Routes:
    """How what this rank's group sums goes through nodes.

    ranks: the group's world ranks, in its order. nodes: those of each node. node: the own one's index. inside: the ranks
    of the own one; None where this rank is alone. between: groups of one rank of each node; the i-th bucket goes over
    number i modulo their count, so that the ranks of a node take turns. Where nodes are uneven, a rank is in several; None
    stands for those that it is not in.
    """

    ranks: list[int]
    nodes: list[list[int]]
    node: int
    inside: dist.ProcessGroup | None
    between: list[dist.ProcessGroup | None]

    def leader(self, bucket: int) -> int:
        """The world rank that takes the bucket over the network for this node."""
        mine = self.nodes[self.node]
        return mine[bucket % len(self.between) % len(mine)]

    @property
    def in_order(self) -> bool:
        """Whether the i-th equal slice of a bucket belongs to the ranks of the i-th node."""
        flat = [rank for node in self.nodes for rank in node]
        return flat == self.ranks and len({len(node) for node in self.nodes}) == 1


def find_routes(group: dist.ProcessGroup, node: str, apart: bool) -> Routes | None:
    """The routes of this rank's `group`, one of several of equal purpose; None where each lies on one node.

    Collective over the world. node: this rank's. apart: each rank counts as a node.
    """
    rank = dist.get_rank()
    everyone: list[tuple[str, tuple[int, ...]]] = gather_values((node, tuple(dist.get_process_group_ranks(group))))
    names = [one for one, _ in everyone]
    groups = sorted({ranks for _, ranks in everyone})
    # Ranks of the tensor axis have the same values of what it does not cut, and must come to the same sums: so all groups
    # go through nodes in the same way, or none does.
    if apart or len({_pattern(ranks, names) for ranks in groups}) > 1:
        names = [str(one) for one in range(len(names))]
    if all(len(_by_node(ranks, names)) == 1 for ranks in groups):
        return None
    made = [_make(ranks, _by_node(ranks, names), rank) for ranks in groups]  # new_group is for the whole world to call
    return next(routes for ranks, routes in zip(groups, made, strict=True) if rank in ranks)


def _by_node(ranks: Sequence[int], names: Sequence[str]) -> list[list[int]]:
    nodes: dict[str, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(names[rank], []).append(rank)
    return list(nodes.values())


def _pattern(ranks: Sequence[int], names: Sequence[str]) -> tuple[int, ...]:
    """The number of each rank's node, counted as they come."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(names[rank], len(numbers)) for rank in ranks)


def _make(ranks: Sequence[int], nodes: list[list[int]], rank: int) -> Routes:
    inside = [_new_group(node) if len(node) > 1 else None for node in nodes]
    turns = range(max(map(len, nodes)))
    between = [_new_group([node[turn % len(node)] for node in nodes]) for turn in turns]
    mine = next((i for i, node in enumerate(nodes) if rank in node), 0)
    return Routes(list(ranks), nodes, mine, inside[mine], between)


def _new_group(ranks: list[int]) -> dist.ProcessGroup | None:
    """None where this rank is none of them."""
    group = dist.new_group(ranks)
    return group if isinstance(group, dist.ProcessGroup) else None
