"""Figures of memory from papers, planned under the papers' assumptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.planning.simulation import plan_rank

PLUGINS = """
from contextlib import nullcontext
import torch
from hpctrain.api import Optimizer, Options, Precision, hookimpl

class Halves(Precision):
    name = "halves"
    @property
    def parameter_dtype(self):
        return torch.bfloat16
    def forward(self, device):
        return nullcontext()

class Master(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr})
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None and not self.state[one]:
                    for name in ("copy", "exp_avg", "exp_avg_sq"):
                        self.state[one][name] = torch.zeros_like(one, dtype=torch.float32)

class MasterOptions(Options):
    lr: float = 1e-3

class InFloat32(Optimizer):
    name = "in-float32"
    Options = MasterOptions
    def build(self, groups):
        return Master(groups, **self.options.model_dump())

@hookimpl
def hpctrain_precision():
    return [Halves]

@hookimpl
def hpctrain_optimizer():
    return [InFloat32]
"""
MODEL = '''
from torch import nn

def build():
    """7.5 billion parameters."""
    return nn.Sequential(*(nn.Linear(20_000 + 5_000 * (n % 2), 25_000 - 5_000 * (n % 2), bias=False) for n in range(15)))
'''


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.88)])
def test_the_table_of_zero(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, gigabytes: float) -> None:
    """7.5 billion parameters on 64 ranks, mixed precision with Adam (Rajbhandari et al., "ZeRO", 2020, figure 1)."""
    (tmp_path / "halves.py").write_text(PLUGINS)
    (tmp_path / "of_the_paper.py").write_text(MODEL + (
        "\n\ndef samples(split):\n    import torch\n\n"
        "    return [(torch.zeros(20_000), torch.zeros(25_000))] * 64 if split == 'train' else None\n"
    ))  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    tables: dict[str, Any] = {
        "job": {"name": "paper", "steps": 3, "output_dir": str(tmp_path / "out")},
        "plugins": {"load": ["halves"]},
        "model": {"name": "of_the_paper:build", "loss": "torch.nn.functional:mse_loss"},
        "dataset": {"name": "of_the_paper:samples"},
        "optimizer": {"name": "in-float32"},
        "precision": {"mode": "halves"},
        "batch": {"global_size": 64, "micro_size": 1},
        "sharding": {"stage": stage, **({"wrap": "class:Linear"} if stage == 3 else {})},
    }
    found = plan_rank(check(RawJob(tables, {}, "job"), 64), 0, 64, per_node=8)
    kept = (found.parameters + found.gradients + found.optimizer_state) / 1e9
    assert f"{kept:.3g}" == f"{gigabytes:.3g}"
