"""Measures the figures of a machine for `hpctrain plan`, on all ranks at once, as they train."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpctrain.base.devices import allow_tf32, is_accelerator, mark, memory_left, seconds_between
from hpctrain.contracts.life_cycle import Control
from hpctrain.ranks.detection import detect
from hpctrain.ranks.json_collectives import broadcast_value, gather_values
from hpctrain.registry.hookspecs import hookimpl
from hpctrain.training.rank import run
from hpctrain_tools.plan.watch import Watch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ROUNDS = 7
# the size of a model whose step is the trainer's own time and that of its operators
_LAYERS, _WIDTH, _STEPS = 16, 8, 60
# times of its steps
_SECONDS: list[float] = []
# bytes of a collective whose latency does not count
_LARGE = 64 * 2**20


def measure(device: torch.device, node: str, small: float) -> dict[str, Any]:
    """The table [machine]. Collective over the world, which communicates on `device`. node: this rank's. small: seconds of a step
    of `train_small`.

    All ranks measure at the same time, since they share a node's memory, cores and adapters; the slowest one's median counts.
    """
    size, copied = (8192, 2**30) if is_accelerator(device) else (512, 2**26)
    flops = {name: 2 * size**3 / _seconds(_product(size, dtype, device), device) for name, dtype in _DTYPES.items()}
    if is_accelerator(device):
        allow_tf32(device, True)
        flops["tf32"] = 2 * size**3 / _seconds(_product(size, torch.float32, device), device)
    source = torch.ones(copied // 4, device=device)
    target, one = torch.empty_like(source), torch.ones(1, device=device)
    nodes = gather_values(node)
    local = [rank for rank, name in enumerate(nodes) if name == node]
    place = local.index(dist.get_rank())
    peers = [rank for rank, name in enumerate(nodes) if nodes[:rank].count(name) == place]
    inside, across = _bandwidth(local, device), _bandwidth(peers, device)
    step = _plain_step(device)
    with Watch(device.type) as watch:
        step()
    plain = _seconds(step, device)
    measured = {
        "memory": float(_memory(device) // (1 if is_accelerator(device) else len(local))),
        "bandwidth": 2 * copied / _seconds(lambda: target.copy_(source), device),
        "flops": flops,
        "efficiency": 1.0,
        "launch": plain / sum(watch.operators.values()),
        "overhead": max(float(broadcast_value(small)) - plain, 1e-6),
    }
    if len(nodes) > 1:
        measured["latency"] = _seconds(lambda: dist.all_reduce(one), device) / len(set(nodes))
        measured |= {"inside": inside or across, "across": across or inside}
    others = {"accelerator": is_accelerator(device), "inside": 1e9, "across": 1e9}
    return {**others, "per_node": len(local), **measured, "measured": list(measured)}


def train_small(directory: str) -> float:
    """Train a small model in this process, which has no torch.distributed; the seconds of a step. directory: rank 0's counts."""
    here = f"{__name__}:"
    tables: dict[str, Any] = {
        "job": {"name": "small", "steps": _STEPS + 1, "output_dir": directory},
        "plugins": {"load": [__name__]},
        "model": {"name": here + small_model.__name__, "loss": "torch.nn.functional:mse_loss"},
        "dataset": {"name": here + small_samples.__name__},
        "optimizer": {"name": "torch.optim:AdamW", "lr": 1e-3},
        "precision": {"mode": "fp32"},
        "batch": {"global_size": _WIDTH * detect().size, "micro_size": _WIDTH},
    }
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        run(tables, resume="never")
    return statistics.quantiles(_SECONDS[_STEPS // 4 :], n=4)[0]  # other work on the node only makes steps longer


@hookimpl
def hpctrain_step_end(metrics: dict[str, Any], control: Control) -> None:
    """Note the seconds of a step, and end the training without a checkpoint, which nodes would have to share."""
    _SECONDS.append(metrics["step_seconds"])
    if len(_SECONDS) == _STEPS:
        control.stop("it is measured", save=False)


def small_model() -> nn.Module:
    """The model of `train_small`."""
    return nn.Sequential(*(one for _ in range(_LAYERS) for one in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())))


def small_samples(split: str) -> list[tuple[Tensor, Tensor]] | None:
    """The samples of `train_small`."""
    return [(torch.ones(_WIDTH),) * 2] * 2**14 if split == "train" else None


def _plain_step(device: torch.device) -> Callable[[], object]:
    """A step of `small_model` without a trainer."""
    model, given = small_model().to(device), torch.ones(_WIDTH, _WIDTH, device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(given), given).backward()
        optimizer.step()

    step()
    return step


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    one = torch.ones(size, size, dtype=dtype, device=device)
    out = torch.empty_like(one)
    return lambda: torch.mm(one, one, out=out)


def _memory(device: torch.device) -> int:
    left = memory_left(device)
    return psutil.virtual_memory().total if left is None else left[1]


def _bandwidth(ranks: list[int], device: torch.device) -> float | None:
    """The bytes/s that each of `ranks` sends in a sum of them while the other ranks do so among theirs; None for one rank.
    Collective over the world."""
    groups = [list(members) for members in dict.fromkeys(map(tuple, gather_values(ranks)))]
    mine, _ = dist.new_subgroups_by_enumeration(groups)
    tensor = torch.ones(_LARGE // 4, device=device)
    taken = _seconds(lambda: dist.all_reduce(tensor, group=mine), device)
    return 2 * (len(ranks) - 1) / len(ranks) * _LARGE / taken if len(ranks) > 1 else None


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
