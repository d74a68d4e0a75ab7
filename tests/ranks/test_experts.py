"""An axis with parameters of its own (experts.py): their gradients are summed over some of the data-parallel ranks only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from modules import foreign_steps
from plain import module_of
from test_stages import compare
from training import train_here

from hpctrain.checking.check import check
from hpctrain.job.problems import JobError
from hpctrain.job.raw import RawJob

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2)]


def tables_of(root: Any, experts: int, steps: int = 6, replicate: int = 1, **sharding: Any) -> dict[str, Any]:
    return {
        "job": {"name": "experts", "steps": steps, "seed": 4, "output_dir": str(root)}, "plugins": {"load": ["experts"]},
        "model": {"name": "mixture"}, "dataset": {"name": "modules:samples"}, "sharding": sharding,
        "optimizer": {"name": "adamw", "lr": 0.05}, "precision": {"mode": "fp64"},
        "batch": {"global_size": 48, "micro_size": 12 // (dist.get_world_size() // experts)},
        "parallelism": {"expert": experts, "replicate": replicate},
    }  # fmt: skip


@pytest.mark.cases(thorough=["2-1-{'stage': 1, 'reduce_bucket_size': 200}"], rest="nightly")
@pytest.mark.parametrize(
    ("experts", "replicate", "sharding"),
    [
        (2, 1, {"stage": 0}), (2, 1, {"stage": 1, "reduce_bucket_size": 200}), (2, 1, {"stage": 2}), (2, 2, {"stage": 1}),
        (4, 1, {"stage": 2}), (4, 1, {"stage": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_experts_train_as_in_one_process(root, experts: int, replicate: int, sharding: dict[str, Any]) -> None:
    """Then on without the axis, and back on it: moments of experts, too, are those of the whole model."""
    if dist.get_world_size() % (experts * replicate):
        pytest.skip(f"needs a multiple of {experts * replicate} ranks")
    tables = tables_of(root, experts, 4, replicate, **sharding)
    expected = foreign_steps(module_of(tables, torch.float64), tables_of(root, experts, 9), torch.optim.AdamW, lr=0.05)
    rows = train_here(tables).rows
    rows += train_here(
        {**tables_of(root, 1, 7, stage=2), "parallelism": {}, "batch": {"global_size": 48, "micro_size": 4}}
    ).rows
    rows += train_here(tables_of(root, experts, 9, replicate, **sharding)).rows
    compare(rows, expected, losses=1e-10, norms=1e-10)


@pytest.mark.cases(thorough=["{'stage': 2}"], rest="nightly")
@pytest.mark.parametrize("sharding", [{"stage": 0}, {"stage": 1, "reduce_bucket_size": 200}, {"stage": 2}], ids=str)
def test_experts_that_tensor_parallelism_cuts_too(root, sharding: dict[str, Any]) -> None:
    """Matrices over two axes; then on without either axis, and back on both."""
    if dist.get_world_size() % 4:
        pytest.skip("needs a multiple of 4 ranks")
    axes = {"expert": 2, "tensor": {"size": 2, "plan": {"head": "colwise_rep"}}}
    tables = {**tables_of(root, 4, 4, **sharding), "parallelism": axes}
    expected = foreign_steps(module_of(tables, torch.float64), tables_of(root, 4, 9), torch.optim.AdamW, lr=0.05)
    rows = train_here(tables).rows
    whole = tables_of(root, 1, 7, stage=2)
    rows += train_here({**whole, "parallelism": {}, "batch": {"global_size": 48, "micro_size": 4}}).rows
    rows += train_here({**tables_of(root, 4, 9, **sharding), "parallelism": axes}).rows
    compare(rows, expected, losses=1e-10, norms=1e-10)


def test_a_strategy_that_cannot_sum_over_some_ranks_refuses(root) -> None:
    with pytest.raises(JobError, match=r"expert has parameters of its own"):
        check(RawJob(tables_of(root, 2, stage=3), {}, "job"), 4)
