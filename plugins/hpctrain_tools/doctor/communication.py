"""Checks between ranks: links, and the speed of a matrix product on each rank. Collective over the world."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpctrain.base.devices import is_accelerator, mark, seconds_between
from hpctrain.ranks.json_collectives import gather_values
from hpctrain_tools.doctor.findings import Finding, FindingOfRanks, row_of

_BYTES = 4 * 2**20
# exchanges of a small and of a large message; the fastest counts, so that a busy moment does not
_PINGS, _ROUNDS = 20, 4
# A link this many times slower than the fast ones of its kind is slow
_SLOWER = 3
_SLOW_NETWORK = 50e6  # bytes per second: below half of gigabit Ethernet's
_SLOW_PING = 1e-3  # seconds; below this, a difference does not matter
_WORK_SECONDS = 1.0
_SLOW_WORK = 2


@dataclass(frozen=True)
class RankPair:
    """Two ranks. latency: seconds one way. bandwidth: bytes per second."""

    ranks: tuple[int, int]
    latency: float
    bandwidth: float


def ring(size: int) -> list[list[tuple[int, int]]]:
    """Neighbouring ranks, in rounds in which no rank is in two pairs: linear in `size`."""
    pairs = [(rank, rank + 1) for rank in range(size - 1)] + ([(size - 1, 0)] if size > 2 else [])
    last = [pairs.pop()] if size > 2 and size % 2 else []
    return [one for one in (pairs[::2], pairs[1::2], last) if one]


def measure_links(device: torch.device) -> list[RankPair]:
    """The links of the ring, on all ranks."""
    rank, mine = dist.get_rank(), []
    for pairs in ring(dist.get_world_size()):
        dist.barrier()
        for first, second in pairs:
            if rank == first:
                latency = _exchange(torch.zeros(1, device=device), second, True, _PINGS)
                seconds = _exchange(torch.zeros(_BYTES // 4, device=device), second, True, _ROUNDS)
                mine.append([first, second, latency, _BYTES / seconds])
            elif rank == second:
                _exchange(torch.zeros(1, device=device), first, False, _PINGS)
                _exchange(torch.zeros(_BYTES // 4, device=device), first, False, _ROUNDS)
    found = [
        RankPair((first, second), *numbers) for of_rank in gather_values(mine) for first, second, *numbers in of_rank
    ]
    return sorted(found, key=lambda link: link.ranks)


def judge_links(links: Sequence[RankPair], nodes: Sequence[str]) -> list[FindingOfRanks]:
    """A row for the links within nodes and one for those between, and one for each slow link, or node if all its are slow."""
    rows = []
    inside = [link for link in links if nodes[link.ranks[0]] == nodes[link.ranks[1]]]
    between = [link for link in links if link not in inside]
    for name, of_kind, floor in (("links in nodes", inside, 0.0), ("links of nodes", between, _SLOW_NETWORK)):
        if not of_kind:
            continue
        fast, quick = _upper(link.bandwidth for link in of_kind), -_upper(-link.latency for link in of_kind)
        slow = [
            link
            for link in of_kind
            if link.bandwidth < max(fast / _SLOWER, floor) or link.latency > max(quick * _SLOWER, _SLOW_PING)
        ]
        rows += _slow_rows(name, of_kind, slow, nodes, f"the fast ones have {fast / 1e6:,.0f} MB/s, {_us(quick)}")
        good = [link for link in of_kind if link not in slow]
        if good:
            middle = statistics.median(link.bandwidth for link in good)
            latency = statistics.median(link.latency for link in good)
            text = f"{len(good)} of {len(of_kind)} measured: {middle / 1e6:,.0f} MB/s, {_us(latency)} (medians)"
            ranks = sorted({rank for link in good for rank in link.ranks})
            rows.append(row_of(Finding(name, "ok", text), ranks, nodes))
    return rows


def _slow_rows(
    check: str, links: Sequence[RankPair], slow: Sequence[RankPair], nodes: Sequence[str], fast: str
) -> list[FindingOfRanks]:
    def ends(link: RankPair) -> set[str]:
        return {nodes[rank] for rank in link.ranks}

    among = {node for link in slow for node in ends(link)}
    bad = {node for node in among if all(link in slow for link in links if node in ends(link))}
    if len(set(nodes)) < 3 or check == "links in nodes":
        bad = set()  # with two nodes, either may be at fault
    remedy = "look at the node's network (cable, switch port, speed: ethtool) and at what else uses it"
    rows = []
    for node in sorted(bad):
        of_node = [link for link in slow if node in ends(link)]
        text = f"all links of {node} are slow: {_numbers(of_node)}; {fast}"
        finding = Finding(check, "warn", text, f"{remedy}, or leave the node out (srun --exclude={node})")
        rows.append(row_of(finding, [rank for rank, name in enumerate(nodes) if name == node], nodes))
    for link in slow:
        if not ends(link) & bad:
            first, second = link.ranks
            text = (
                f"slow between rank {first} on {nodes[first]} and rank {second} on {nodes[second]}: {_numbers([link])}"
            )
            slower = "" if len(links) == len(slow) else f"; {fast}"
            told = "other programs on the node?" if check == "links in nodes" else remedy
            rows.append(row_of(Finding(check, "warn", text + slower, told), link.ranks, nodes))
    return rows


def work_speeds(device: torch.device) -> list[float]:
    """Each rank's speed of matrix products in 1e9 operations per second over a fixed time, pauses included."""
    size = 4096 if is_accelerator(device) else 384
    matrix = torch.full((size, size), 1 / size, device=device)
    for _ in range(3):
        matrix = matrix.mm(matrix)
    dist.barrier()
    begin, done = mark(device), 0
    while (seconds := seconds_between(begin, mark(device))) < _WORK_SECONDS:
        matrix = matrix.mm(matrix)
        done += 1
    return list(gather_values(2 * size**3 * done / seconds / 1e9))


def judge_work(speeds: Sequence[float], nodes: Sequence[str]) -> list[FindingOfRanks]:
    """A row for each slow rank, and one for the others."""
    fast = _upper(speeds)
    slow = [rank for rank, speed in enumerate(speeds) if speed < fast / _SLOW_WORK]
    rows = []
    for rank in slow:
        finding = Finding("matrix product", "warn", f"{speeds[rank]:,.1f} GFLOP/s; the fast ranks have {fast:,.1f}",
                          "look for other programs on its cores (top), too few cores in its mask, a throttled clock")  # fmt: skip
        rows.append(row_of(finding, [rank], nodes))
    rest = [rank for rank in range(len(speeds)) if rank not in slow]
    text = f"{statistics.median(speeds[rank] for rank in rest):,.1f} GFLOP/s (median)"
    return [*rows, row_of(Finding("matrix product", "ok", text), rest, nodes)]


def _exchange(message: torch.Tensor, peer: int, begins: bool, rounds: int) -> float:
    """Send `message` there and back; seconds of the fastest way."""
    times = []
    for _ in range(rounds + 1):  # the first connects
        begin = mark(message.device)
        steps: tuple[Callable[..., object], ...] = (dist.send, dist.recv) if begins else (dist.recv, dist.send)
        for step in steps:
            step(message, peer)
        times.append(seconds_between(begin, mark(message.device)))
    return min(times[1:]) / 2


def _upper(values: Iterable[float]) -> float:
    """The third quartile, rounded up: of two or three values the largest, so that a slow one is not its own measure."""
    found = sorted(values)
    return found[-(-3 * (len(found) - 1) // 4)]


def _numbers(links: Sequence[RankPair]) -> str:
    worst = min(links, key=lambda link: link.bandwidth)
    return f"{worst.bandwidth / 1e6:,.1f} MB/s, {_us(max(link.latency for link in links))}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"
