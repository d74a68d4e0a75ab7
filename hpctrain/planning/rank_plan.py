"""The needs of one rank in a step: its memory, its operators, what it sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpctrain.planning.watch import Operator

OTHERS = "activations and buffers"

_SENT: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "all_gather": lambda n: n - 1.0,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
    "recv": lambda n: 0.0,
}
"""The share of its input that one of n ranks sends with the best algorithm for large messages."""


@dataclass(frozen=True)
class Exchange:
    """The operations of one kind on one axis in a step. nbytes: of their inputs on this rank."""

    axis: str
    operation: str
    ranks: int
    calls: int
    nbytes: int
    inside_node: bool

    @property
    def sent(self) -> float:
        """Bytes that this rank sends, at least."""
        return self.nbytes * _SENT[self.operation](self.ranks)


@dataclass(frozen=True)
class RankPlan:
    """The needs of one rank in a step that is not the first one.

    axes: the size of each axis of the layout. parameters, gradients, optimizer_state: bytes that are held when the step is over.
    peak: the most bytes that live at once; at_peak: what they are of. start: the most bytes until the first step.
    """

    rank: int
    axes: dict[str, int]
    parameters: int
    gradients: int
    optimizer_state: int
    peak: int
    at_peak: dict[str, int]
    start: int
    operators: dict[Operator, int]
    exchanges: list[Exchange]
    micro_batches: int

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(one.flops * count for one, count in self.operators.items())

    @property
    def most(self) -> int:
        """The most bytes that live at once, at the start or in a step."""
        return max(self.peak, self.start)
