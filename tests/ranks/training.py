"""Trains a job on ranks that have already met, as `hpctrain run` does from the session on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from hpctrain.base.torch_private import clear_sharding_cache
from hpctrain.checking.check import check
from hpctrain.contracts.identity import Identity
from hpctrain.job.raw import RawJob
from hpctrain.ranks.detection import detect
from hpctrain.ranks.meeting import World
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.ranks.signals import StopRequest
from hpctrain.registry.hookspecs import hookimpl
from hpctrain.registry.life_cycle import LifeCycle
from hpctrain.training.assembly import assemble
from hpctrain.training.loop import train
from hpctrain.training.session import Session
from hpctrain.training.start import Start


def thorough(*values: Any) -> Any:
    """A case of a parametrized test that takes long."""
    return pytest.param(*values, marks=pytest.mark.thorough)


def nightly(*values: Any) -> Any:
    """A case of a parametrized test for the night: others show the same."""
    return pytest.param(*values, marks=pytest.mark.nightly)


TINY: dict[str, Any] = {
    "job": {"name": "tiny", "steps": 6, "seed": 11},
    # 61 and 20 rows: no number of ranks divides both
    "model": {
        "name": "gpt", "hidden_size": 20, "layers": 2, "attention_heads": 2, "vocab_size": 61, "max_seq_length": 8,
    },
    "dataset": {"name": "synthetic", "samples": 500},
    "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.1},
    "batch": {"global_size": 24, "micro_size": 2},
    "precision": {"mode": "fp32"},
}  # fmt: skip
SGD = {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.36}
"""AdamW hides a wrongly scaled gradient, SGD shows it; the clip binds in about half of the steps."""


def job(**tables: dict[str, Any]) -> dict[str, Any]:
    """TINY with `tables` merged in. A table with another name replaces the original."""
    made: dict[str, Any] = json.loads(json.dumps(TINY))
    for name, table in tables.items():
        other = table.get("name") not in (None, made.get(name, {}).get("name"))
        made[name] = dict(table) if other else {**made.get(name, {}), **table}
    return made


def own_device() -> torch.device:
    """The device of this rank: the current accelerator where on_ranks.py has found one to train on."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


class Rows:
    """Collects each step's row on every rank."""

    def __init__(self, at_step: Callable[[], None] | None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self.measured: list[str] = []
        self._at_step = at_step

    @hookimpl
    def hpctrain_step_end(self, step: int, metrics: dict[str, Any]) -> None:
        self.rows.append(dict(metrics))
        if self._at_step is not None:
            self._at_step()

    @hookimpl
    def hpctrain_measured(self, names: Sequence[str]) -> None:
        self.measured = list(names)

    @hookimpl
    def hpctrain_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        self.evaluations.append(dict(metrics))


@contextmanager
def session_of(tables: dict[str, Any], plugin: object = None, identity: Identity | None = None) -> Iterator[Session]:
    """A session over all ranks; its groups are destroyed at the end. identity: None for the one that the launcher gives."""
    identity = identity or detect()
    checked = check(RawJob(tables, {}, "job"), dist.get_world_size())
    if plugin is not None:
        checked.registry.manager.register(plugin)
    before = set(dist.distributed_c10d._world.pg_map)
    hooks = LifeCycle(checked.registry, identity, checked.parts.hooks)
    start = Start(identity, RankChannel(), lambda: checked.raw)
    start.world, start.checked = World(identity, HashStore(), start.channel), checked
    start.device, start.hooks = own_device(), hooks
    session = assemble(start)
    try:
        yield session
    finally:
        session.close()
        dist.barrier()
        for group in set(dist.distributed_c10d._world.pg_map) - before:
            dist.destroy_process_group(group)
        clear_sharding_cache(own_device())


def train_here(tables: dict[str, Any], at_step: Callable[[], None] | None = None) -> Rows:
    """Train to the end; `job.output_dir` must be the same on all ranks. `at_step` runs after each optimizer step."""
    rows = Rows(at_step)
    with session_of(tables, rows) as session:
        train(session, StopRequest())
    return rows
