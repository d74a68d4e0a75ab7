"""Measures the figures of a machine for `hpctrain plan`, on all ranks at once, as they train."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import groupby
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist

from hpctrain.base.devices import allow_tf32, is_accelerator, mark, memory_left, seconds_between
from hpctrain.ranks.json_collectives import gather_values

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROUNDS, _LAUNCHES = 7, 200
_LARGE = 64 * 2**20
"""Bytes of a collective whose latency does not count."""


def measure(device: torch.device, node: str) -> dict[str, Any]:
    """The table [machine]. Collective over the world, which communicates on `device`. node: this rank's.

    All ranks measure at the same time, since they share a node's memory and cores; the slowest one's median counts.
    """
    size, copied = (8192, 2**30) if is_accelerator(device) else (1024, 2**26)
    flops = {name: 2 * size**3 / _seconds(_product(size, dtype, device), device) for name, dtype in _DTYPES.items()}
    if is_accelerator(device):
        allow_tf32(device, True)
        flops["tf32"] = 2 * size**3 / _seconds(_product(size, torch.float32, device), device)
    source = torch.ones(copied // 4, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)
    nodes = gather_values(node)
    local = [rank for rank, name in enumerate(nodes) if name == node]
    inside = _bandwidth(local, device)
    firsts = [
        next(iter(ranks))[0] for _, ranks in groupby(sorted(enumerate(nodes), key=lambda at: at[1]), lambda at: at[1])
    ]
    across = _bandwidth(firsts, device) if len(firsts) > 1 else None
    sending = across or inside
    return {
        "accelerator": is_accelerator(device),
        "memory": float(_memory(device) // (1 if is_accelerator(device) else len(local))),
        "bandwidth": 2 * copied / _seconds(lambda: target.copy_(source), device),
        "flops": flops,
        "inside": inside or sending or 1e9,
        "across": sending or 1e9,
        "latency": _seconds(lambda: dist.all_reduce(one), device) if len(nodes) > 1 else 2e-5,
        "launch": _seconds(lambda: [one.mul_(1) for _ in range(_LAUNCHES)], device) / _LAUNCHES,
        "efficiency": 1.0,
        "per_node": len(local),
    }


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    one = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(one)
    return lambda: torch.mm(one, one, out=out)


def _memory(device: torch.device) -> int:
    left = memory_left(device)
    return psutil.virtual_memory().total if left is None else left[1]


def _bandwidth(ranks: list[int], device: torch.device) -> float | None:
    """The bytes/s that each of `ranks` sends in a sum of them; None for one rank. Collective over the world."""
    everyone = gather_values(sorted(ranks))
    groups = [list(members) for members in dict.fromkeys(map(tuple, everyone)) if len(members) > 1]
    made = {tuple(members): dist.new_group(members) for members in groups}
    mine = made.get(tuple(sorted(ranks)))
    if mine is None or dist.get_rank() not in ranks:
        _seconds(lambda: None, device)  # the others measure together
        return None
    tensor = torch.ones(_LARGE // 4, device=device)
    taken = _seconds(lambda: dist.all_reduce(tensor, group=mine), device)
    return 2 * (len(ranks) - 1) / len(ranks) * _LARGE / taken


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """The slowest rank's median. Collective over the world."""
    taken = []
    for number in range(_ROUNDS + 2):
        gather_values(number)  # begin together
        begin = mark(device)
        action()
        end = mark(device)
        seconds = seconds_between(begin, end)
        if number > 1:
            taken.append(seconds)
    return float(max(gather_values(statistics.median(taken))))
