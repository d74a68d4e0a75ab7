"""The findings of checks: on a rank a finding, for the user a row for all ranks that found the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from hpctrain.base.errors import name_ranks, reason

State = Literal["ok", "warn", "fail"]
STATES: tuple[State, ...] = ("ok", "warn", "fail")
# rows of a check that are printed; JSON has all
_MOST = 8


@dataclass(frozen=True)
class Finding:
    """A rank's finding. remedy: what to do, for warn and fail."""

    check: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class FindingOfRanks(Finding):
    """A finding of several ranks, with their nodes, each once."""

    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()


def row_of(finding: Finding, ranks: Iterable[int], nodes: Sequence[str]) -> FindingOfRanks:
    """The row of a finding about `ranks`. nodes: of all ranks."""
    ranks = tuple(ranks)
    return FindingOfRanks(**asdict(finding), ranks=ranks, nodes=tuple(dict.fromkeys(nodes[rank] for rank in ranks)))


def merged(reports: Sequence[Sequence[Finding]], nodes: Sequence[str]) -> list[FindingOfRanks]:
    """A row for equal findings of several ranks: checks in order, the worst first. reports, nodes: of each rank."""
    ranks: dict[Finding, list[int]] = {}
    for rank, report in enumerate(reports):
        for finding in report:
            ranks.setdefault(finding, []).append(rank)
    order = list(dict.fromkeys(finding.check for finding in ranks))
    rows = [row_of(finding, found, nodes) for finding, found in ranks.items()]
    return sorted(rows, key=lambda row: (order.index(row.check), -STATES.index(row.state)))


def tried(check: str, action: Callable[[], Finding]) -> Finding:
    """The finding of `action`; a failure if it raises, since a check must not end the others."""
    try:
        return action()
    except Exception as error:
        return Finding(check, "fail", f"the check ended with {type(error).__name__}: {reason(error)}", "look into it")


def lines(rows: Sequence[FindingOfRanks], ranks: int) -> Iterator[str]:
    """The rows for people: state, check, what was found and where, and the remedy below. ranks: of the job."""
    for check in dict.fromkeys(row.check for row in rows):
        of_check = [row for row in rows if row.check == check]
        for number, row in enumerate(of_check[:_MOST]):
            name = check if number == 0 else ""
            everywhere = len(row.ranks) == ranks or (row.state == "ok" and len(of_check) == 1)
            yield f"{row.state:5} {name:18} {'' if everywhere else _where(row) + ': '}{row.found}"
            if row.remedy:
                yield f"{'':24} -> {row.remedy}"
        if len(of_check) > _MOST:
            yield f"{'':24} and {len(of_check) - _MOST} more"


def _where(row: FindingOfRanks) -> str:
    nodes = ", ".join(row.nodes[:_MOST]) + (" and others" if len(row.nodes) > _MOST else "")
    return f"{name_ranks(list(row.ranks))} on {nodes}"
