"""The needs of one rank in a step: its memory, its operators, what it sends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from hpctrain_tools.plan.watch import Operator

OTHERS = "activations and buffers"

# the share of its input that one of n ranks sends with the best algorithm for large messages
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
RING = "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"
"""Operations of which each rank passes on what comes from the one before it."""


@dataclass(frozen=True)
class Exchange:
    """The operations of one kind on one axis in a step. nbytes: of their inputs on this rank. in_node: the group's ranks that share
    a node."""

    axis: str
    operation: str
    ranks: int
    calls: int
    nbytes: int
    in_node: int

    @property
    def kind(self) -> tuple[str, str, int, int]:
        """The axis, the operation, the number of ranks and how many share a node."""
        return self.axis, self.operation, self.ranks, self.in_node

    @property
    def inside_node(self) -> bool:
        """Whether all of the group share a node."""
        return self.in_node == self.ranks

    @property
    def sent(self) -> float:
        """Bytes that this rank sends, at least."""
        return self.nbytes * _SENT[self.operation](self.ranks)


@dataclass(frozen=True)
class Save:
    """The bytes of a rank's part of a checkpoint, the most on the device while it is saved, and the most in the host's memory."""

    nbytes: int
    peak: int
    host: int


@dataclass(frozen=True)
class RankPlan:
    """The needs of one rank in a step that is not the first one.

    axes: the size of each axis of the layout. parameters, gradients, optimizer_state: bytes that are held on the device when the
    step is over. inputs: of all micro batches, which lie on the device from the begin of the step. peak: the most bytes that live
    at once; at_peak: what they are of; origins: those of `OTHERS` by "module: operator". host: the most bytes in the host's
    memory. start: the most bytes until the first step. operators: each kind and its number. idle: the share of the step in which
    it waits for other parts of the model. waiting_inputs: the inputs that the peak does not have. uneven: whether micro batches
    differ in their shapes. loading: seconds in which this machine loaded the samples of a step. guesses: see Watch.
    """

    rank: int
    axes: dict[str, int]
    parameters: int
    gradients: int
    optimizer_state: int
    peak: int
    at_peak: dict[str, int]
    origins: dict[str, int]
    host: int
    start: int
    inputs: int
    waiting_inputs: int
    operators: list[tuple[Operator, int]]
    guesses: int
    exchanges: list[Exchange]
    micro_batches: int
    idle: float = 0.0
    uneven: bool = False
    loading: float = 0.0
    save: Save = Save(0, 0, 0)

    def with_micro_batches(self, number: int, more_of: RankPlan, fewer: RankPlan, peak_grows: bool) -> RankPlan:
        """The plan of a step with `number` micro batches: each one that this step has not takes what `more_of` has more than
        `fewer`. peak_grows: whether it takes memory at the peak, too."""
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

        of_operators, of_more, of_fewer = (dict(plan.operators) for plan in (self, more_of, fewer))
        peak = more(self.peak, more_of.peak, fewer.peak) if peak_grows else self.peak
        return replace(
            self,
            peak=peak,
            host=more(self.host, more_of.host, fewer.host) if peak_grows else self.host,
            at_peak={**self.at_peak, OTHERS: self.at_peak[OTHERS] + peak - self.peak},
            operators=[
                (one, more(count, of_more.get(one, 0), of_fewer.get(one, 0))) for one, count in of_operators.items()
            ],
            exchanges=[scaled(one) for one in self.exchanges],
            micro_batches=number,
        )

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return sum(one.flops * count for one, count in self.operators)

    @property
    def most(self) -> int:
        """The most bytes that live on the device at once: at the start, in a step, in a save."""
        return max(self.peak + self.waiting_inputs, self.start, self.save.peak)
