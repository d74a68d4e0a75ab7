"""Deals the accelerators of each machine out to its ranks, and takes a communicator that every rank can use. Rank 0 decides.

A launcher shows a rank all cards of its node, only its own, or those near its cores, in an order of its own. The address on the bus
tells which are the same; not the UUID, since NCCL refuses two ranks on one address, and the slices of a card (MIG) share it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from hpctrain.base.devices import accelerator, accelerator_count, device_name, pci_address, unusable_accelerator
from hpctrain.base.errors import EnvironmentUnfitError, name_ranks
from hpctrain.contracts.communicator import Communicator
from hpctrain.contracts.plugin import Machine
from hpctrain.ranks.binding import machine_id
from hpctrain.ranks.meeting import World

Device = Literal["auto", "accelerator", "cpu"]


class RankReport(NamedTuple):
    """A rank's part of the decision.

    lacks: for each communicator the reason why it can't be used on this rank; None where it can. cards: the addresses of the
    accelerators that it sees, in torch's order. trouble: why torch can't use one that the system has.
    """

    node: str
    machine: str
    lacks: Mapping[str, str | None]
    cards: Sequence[str] = ()
    kind: str = ""
    trouble: str = ""


class Agreed(NamedTuple):
    """The communicator of all ranks, the index of this rank's accelerator (None for the CPU), and a sentence for people."""

    communicator: Communicator
    accelerator: int | None
    remark: str


def agree_on_communicator(
    world: World, asked: Communicator, installed: Sequence[Communicator], device: Device
) -> Agreed:
    """Take the first communicator that every rank can use. Collective.

    EnvironmentUnfitError names the ranks that lack what every candidate needs.
    """
    candidates = asked.candidates(list(installed))
    world.tell("accelerators", report_of(world, candidates))

    def deal() -> list[tuple[str, int | None, str]]:
        reports = [RankReport(*report) for report in world.collect("accelerators")]
        chosen, accelerators, remark = decide(asked.name, candidates, reports, device)
        return [(chosen.name, index, remark) for index in accelerators]

    name, accelerator, remark = world.deal("accelerators/dealt", deal)
    return Agreed(next(candidate for candidate in candidates if candidate.name == name), accelerator, remark)


def report_of(world: World, candidates: Sequence[Communicator]) -> RankReport:
    """This rank's report."""
    identity, kind = world.identity, accelerator()
    count = 0 if kind is None else accelerator_count()
    # where torch tells no address, a single card is taken for this rank's own
    unknown = [f"of rank {identity.rank}" if count == 1 else f"number {index}" for index in range(count)]
    return RankReport(
        node=identity.node,
        machine=machine_id(identity.node),
        lacks={candidate.name: candidate.missing(Machine(identity)) for candidate in candidates},
        cards=[pci_address(torch.device(kind.type, index)) or name for index, name in enumerate(unknown)]
        if kind
        else [],
        kind="" if kind is None else device_name(torch.device(kind.type, 0)),
        trouble="" if kind is not None else unusable_accelerator() or "",
    )


def decide(
    asked: str, candidates: Sequence[Communicator], reports: Sequence[RankReport], device: Device
) -> tuple[Communicator, Sequence[int | None], str]:
    """The first candidate that every rank can use, each rank's accelerator, and a remark. Raises EnvironmentUnfitError if there is
    none."""
    dealt, short = deal_cards(reports)
    reasons: dict[str, str] = {}
    for candidate in candidates:
        name, on_accelerators = candidate.name, candidate.on_accelerators
        lacking = {rank: why for rank, report in enumerate(reports) if (why := report.lacks[name]) is not None}
        if lacking:
            reasons[name] = _of_ranks(lacking, reports)
        elif on_accelerators and device == "cpu":
            reasons[name] = '[communicator] device is "cpu"'
        elif on_accelerators and dealt is None:
            reasons[name] = short
        elif device == "accelerator" and not on_accelerators:
            reasons[name] = '[communicator] device is "accelerator"'
        else:
            unused = "" if on_accelerators or device == "cpu" else _unused(name, reports, reasons)
            return candidate, dealt or [] if on_accelerators else [None] * len(reports), unused
    why_not = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    raise EnvironmentUnfitError(
        f"[communicator] name = {asked!r}, device = {device!r}: none fits all ranks ({why_not})"
    )


def deal_cards(reports: Sequence[RankReport]) -> tuple[list[int] | None, str]:
    """A card of its own for each rank; or None, and why there is none."""
    kinds = sorted({report.kind for report in reports})
    if len(kinds) > 1:
        without = {
            rank: report.trouble or "it sees no accelerator" for rank, report in enumerate(reports) if not report.kind
        }
        return None, _of_ranks(
            without, reports
        ) if without else f"the ranks have different accelerators: {', '.join(kinds)}"
    dealt = [-1] * len(reports)
    for machine in dict.fromkeys(report.machine for report in reports):
        ranks = [rank for rank, report in enumerate(reports) if report.machine == machine]
        indices = match([reports[rank].cards for rank in ranks])
        if indices is None:
            cards = len({card for rank in ranks for card in reports[rank].cards})
            node, some = reports[ranks[0]].node, "accelerator" if cards == 1 else "accelerators"
            return None, f"node {node} has {len(ranks)} ranks and {cards} {some} that they see"
        for rank, card in zip(ranks, indices, strict=True):
            dealt[rank] = card
    return dealt, ""


def match(seen: Sequence[Sequence[str]]) -> list[int] | None:
    """The index of a card for each rank of a machine, no two with one address, in the order of the bus; None if there are too few.

    Ranks that see few cards choose first.
    """
    chosen: dict[int, str] = {}
    for rank in sorted(range(len(seen)), key=lambda rank: len(seen[rank])):
        free = {*seen[rank]} - {*chosen.values()}
        if not free:
            return None
        chosen[rank] = min(free)
    return [seen[rank].index(chosen[rank]) for rank in range(len(seen))]


def _unused(name: str, reports: Sequence[RankReport], reasons: Mapping[str, str]) -> str:
    """A sentence about accelerators that the job leaves alone; empty if there are none."""
    first = next((report for report in reports if report.cards or report.trouble), None)
    if first is None:
        return ""
    cards = len({card for report in reports if report.machine == first.machine for card in report.cards})
    what = f"{cards} x {first.kind}: {'; '.join(reasons.values()) or f'{name} is for CPUs'}" if cards else first.trouble
    keys = '[communicator] device = "accelerator" refuses instead, "cpu" says nothing'
    return f"the ranks compute on CPUs, and node {first.node} has {what} ({keys})"


def _of_ranks(why: Mapping[int, str], reports: Sequence[RankReport]) -> str:
    """The reasons of some ranks: one of all ranks alone, others with ranks and node."""
    if len(why) == len(reports) and len(set(why.values())) == 1:
        return next(iter(why.values()))
    clauses = []
    for node, reason in dict.fromkeys((reports[rank].node, text) for rank, text in why.items()):
        ranks = [rank for rank, text in why.items() if (reports[rank].node, text) == (node, reason)]
        clauses.append(f"{name_ranks(ranks)} on {node}: {reason}")
    return "; ".join(clauses)
