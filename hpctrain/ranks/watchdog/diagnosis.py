"""Puts the statuses of all ranks into sentences: who is missing, who waits for it, and where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.mpi.errors import name_ranks
from hpctrain.ranks.watchdog.status import Beat, RankStatus


class Silent(NamedTuple):
    """A rank that sends no heartbeats. seconds: since the last one. last: None if there never was one."""

    rank: int
    node: str
    seconds: float
    last: Beat | None


def sentences(statuses: Sequence[RankStatus], silent: Sequence[Silent], limit: float) -> list[str]:
    """The diagnosis, a line each. limit: seconds that a phase may take."""
    lines = [f"missing: {_silent(one)}" for one in silent if one.seconds > limit]
    lines += [f"no answer in time: {_late(one)}" for one in silent if one.seconds <= limit]
    absent = [one for one in statuses if one.waits_for is None]
    kinds = {
        "missing": [one for one in absent if one.beat.idle >= limit / 2],
        "at work": [one for one in absent if one.beat.idle < limit / 2],
        "waiting": [one for one in statuses if one.waits_for is not None],
    }
    return lines + [f"{kind}: {told}" for kind, of_kind in kinds.items() for told in _grouped(of_kind)]


def _silent(one: Silent) -> str:
    where = f"last seen in {one.last.where}" if one.last is not None else "never seen"
    return (
        f"rank {one.rank} on {one.node} has sent no heartbeat for {one.seconds:.0f} s: stopped, killed, or its node is out of "
        f"reach ({where})"
    )


def _late(one: Silent) -> str:
    where = f"; it was in {one.last.where}" if one.last is not None else ""
    return f"rank {one.rank} on {one.node}, whose last heartbeat came {one.seconds:.0f} s ago{where}"


def _grouped(statuses: Sequence[RankStatus]) -> list[str]:
    """Ranks that do the same are told together, the fewest first."""
    groups: dict[tuple[object, ...], list[RankStatus]] = {}
    for one in statuses:
        groups.setdefault((one.beat.where, one.line, one.waits_for), []).append(one)
    return [_told(group) for group in sorted(groups.values(), key=lambda group: (len(group), group[0].rank))]


def _told(group: Sequence[RankStatus]) -> str:
    one = group[0]
    nodes = list(dict.fromkeys(member.node for member in group))
    shown = ", ".join(nodes[:3]) + (f" and {len(nodes) - 3} more nodes" if len(nodes) > 3 else "")
    verb = "is" if len(group) == 1 else "are"
    waits = f"; waits for {one.waits_for}" if one.waits_for else ""
    loading = f"; {' and '.join(one.loading[:3])}" if one.loading else ""
    idle = max(member.beat.idle for member in group)
    since = f" for {idle:.0f} s" if idle else ""
    who = f"{name_ranks([member.rank for member in group])} on {shown}"
    return f"{who} {verb} in {one.beat.where}{since}, at {one.line}{waits}{loading}"
