"""`hpctrain plan` against reality: the bytes and the traffic of a real step on each rank, measured as a plan measures its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch.distributed as dist
from torch import Tensor
from training import job, session_of, thorough

import hpctrain.mpi
from hpctrain.planning.watch import Watch
from hpctrain.ranks.signals import StopRequest
from hpctrain.training.loop import train_step

MODEL = {"hidden_size": 64, "layers": 4, "attention_heads": 4, "vocab_size": 512, "max_seq_length": 32}
JOBS: list[Any] = [
    thorough({}),
    thorough({"sharding": {"stage": 1}}),
    thorough({"sharding": {"stage": 2}, "precision": {"mode": "bf16"}}),
    {"sharding": {"stage": 3}},
    thorough({"parallelism": {"tensor": 2}}),
    thorough({"parallelism": {"context": 2}, "activation_checkpointing": {"mode": "full"}}),
    {"parallelism": {"pipeline": 2}, "batch": {"global_size": 64, "micro_size": 4}},
]
SHARES = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_gather": "all_gather_into_tensor",
    "send": "send",
}
"""The name of hpctrain.mpi for an operation."""
_OF_A_RANK = ("PMI", "MPI", "OMPI", "HYD", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")


@pytest.mark.shown_on(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("tables", JOBS, ids=str)
def test_a_plan_is_what_a_step_needs(world, root: Path, tables: dict[str, Any]) -> None:
    made = job(
        job={"output_dir": str(root / "out"), "steps": 3},
        model=MODEL,
        **{"batch": {"global_size": 16, "micro_size": 4}, **tables},
    )
    planned = plan_of(made, root)
    found, sent = measured(made)
    mine = next((one for one in planned["of_ranks"] if one["rank"] == world.rank), None)
    if mine is None:  # another rank with this part of the model was planned
        return
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert mine[name] == found[name], name
    assert mine["peak_bytes"] == pytest.approx(found["peak_bytes"], rel=0.05)
    told = {one["operation"]: 0 for one in mine["exchanges"]}
    for one in mine["exchanges"]:
        told[one["operation"]] += one["nbytes"]
    for name, of_mpi in SHARES.items():
        assert sent.get(of_mpi, 0) - told.get(name, 0) in range(200), name  # a step's count of labels, and its figures


def plan_of(tables: dict[str, Any], root: Path) -> dict[str, Any]:
    """The plan that the command prints, on all ranks; rank 0 asks, in a process that is no rank."""
    told = [None]
    if dist.get_rank() == 0:
        (root / "job.toml").write_text(tomli_w.dumps(tables))
        words = [
            sys.executable,
            "-m",
            "hpctrain",
            "plan",
            str(root / "job.toml"),
            "-n",
            str(dist.get_world_size()),
            "--json",
        ]
        alone = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_RANK)}
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, env=alone)
        assert done.returncode == 0, done
        told = [json.loads(done.stdout)]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None
    return told[0]


def measured(tables: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of this rank in the second step, and those of MPI's operations."""
    watch = Watch()
    with watch, session_of(tables) as session:
        model = session.model
        model.is_tried = True
        loader = session.feed.training_loader(session.progress)
        try:
            train_step(session, loader, StopRequest())
            watch.begin()
            before = hpctrain.mpi.statistics().operations
            train_step(session, loader, StopRequest())
            after = hpctrain.mpi.statistics().operations
        finally:
            loader.close()
        parameters = [*model.module.parameters(), *(piece.tensor for piece in model.pieces)]
        states = [one for state in model.optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
        sent = {name: one.bytes - (before[name].bytes if name in before else 0) for name, one in after.items()}
        return {
            "parameters_bytes": watch.bytes_of(parameters),
            "gradients_bytes": watch.bytes_of(one.grad for one in parameters if one.grad is not None),
            "optimizer_state_bytes": watch.bytes_of(states),
            "peak_bytes": watch.peak,
        }, sent
