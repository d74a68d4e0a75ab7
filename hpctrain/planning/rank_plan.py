"""The needs of one rank in a step: its memory, its operators, what it sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

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
    def kind(self) -> tuple[str, str, int, bool]:
        """The axis, the operation, the number of ranks and whether they share a node."""
        return self.axis, self.operation, self.ranks, self.inside_node

    @property
    def sent(self) -> float:
        """Bytes that this rank sends, at least."""
        return self.nbytes * _SENT[self.operation](self.ranks)


@dataclass(frozen=True)
class RankPlan:
    """The needs of one rank in a step that is not the first one.

    axes: the size of each axis of the layout. parameters, gradients, optimizer_state: bytes that are held when the step is over.
    inputs: of all micro batches, which lie on the device from the begin of the step. peak: the most bytes that live at once;
    at_peak: what they are of. start: the most bytes until the first step. guesses: see Watch.
    """

    rank: int
    axes: dict[str, int]
    parameters: int
    gradients: int
    optimizer_state: int
    peak: int
    at_peak: dict[str, int]
    start: int
    inputs: int
    operators: dict[Operator, int]
    guesses: int
    exchanges: list[Exchange]
    micro_batches: int

    def with_micro_batches(self, number: int, more_of: RankPlan, fewer: RankPlan) -> RankPlan:
        """The plan of a step with `number` micro batches: each one that this step has not needs what `more_of` has more than
        `fewer`."""
        further, by = number - self.micro_batches, more_of.micro_batches - fewer.micro_batches
        if further <= 0 or by <= 0:
            return self

        def more(here: int, there: int, before: int) -> int:
            return here + max(0, there - before) * further // by

        before, there = ({one.kind: (one.calls, one.nbytes) for one in plan.exchanges} for plan in (fewer, more_of))

        def scaled(one: Exchange) -> Exchange:
            seen = there.get(one.kind, (0, 0)), before.get(one.kind, (0, 0))
            calls, nbytes = (more(*at) for at in zip((one.calls, one.nbytes), *seen, strict=True))
            return replace(one, calls=calls, nbytes=nbytes)

        peak = more(self.peak, more_of.peak, fewer.peak)
        return replace(
            self,
            peak=peak,
            at_peak={**self.at_peak, OTHERS: self.at_peak[OTHERS] + peak - self.peak},
            operators={
                one: more(count, more_of.operators.get(one, 0), fewer.operators.get(one, 0))
                for one, count in self.operators.items()
            },
            exchanges=[scaled(one) for one in self.exchanges],
            micro_batches=number,
        )

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(one.flops * count for one, count in self.operators.items())

    @property
    def most(self) -> int:
        """The most bytes that live at once, at the start or in a step."""
        return max(self.peak + self.inputs, self.start)
