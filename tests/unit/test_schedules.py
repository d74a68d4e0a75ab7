"""Schedules against torch's schedulers and the papers' formulas; schedules of one's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import TINY
from torch.optim import lr_scheduler

import hpctrain
from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.contracts.optimization import Schedule
from hpctrain.registry.registry import build_registry
from hpctrain.registry.user_code.optimization import UserSchedule

REGISTRY = build_registry()
STEPS = 40


def schedule(name: str, **options: float) -> Schedule:
    cls = REGISTRY.find("schedule", name).cls
    made: Schedule = cls(cls.Options(**options))
    return made


def of_torch(make: Any, **options: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, factors = make(optimizer, **options), []
    for step in range(STEPS):
        factors.append(scheduler.get_last_lr()[0])
        optimizer.step()
        if step < STEPS - 1:  # OneCycleLR refuses more
            scheduler.step()
    return factors


def factors(plugin: Schedule) -> list[float]:
    return [plugin.factor(step, STEPS) for step in range(STEPS)]


def test_those_that_torch_has() -> None:
    last = STEPS - 1
    assert factors(schedule("polynomial", power=2.0)) == pytest.approx(
        of_torch(lr_scheduler.PolynomialLR, total_iters=last, power=2.0)
    )
    assert factors(schedule("step", every=7, gamma=0.5)) == pytest.approx(
        of_torch(lr_scheduler.StepLR, step_size=7, gamma=0.5)
    )
    assert factors(schedule("cosine", final_factor=0.2)) == pytest.approx(
        of_torch(lr_scheduler.CosineAnnealingLR, T_max=last, eta_min=0.2)
    )
    cycle = {"max_lr": 1.0, "total_steps": STEPS, "pct_start": 0.25, "div_factor": 10, "final_div_factor": 100}
    ours = schedule("one-cycle", rising_share=0.25, first_factor=0.1, final_factor=0.001)
    theirs = of_torch(lr_scheduler.OneCycleLR, **cycle)
    assert factors(ours) == pytest.approx(theirs)


def test_those_of_papers() -> None:
    found = factors(schedule("inverse-sqrt", warmup_steps=10))
    paper = [min((step + 1) ** -0.5, (step + 1) * 10**-1.5) for step in range(STEPS)]
    assert [one / found[0] for one in found[:10]] == pytest.approx([one / paper[0] for one in paper[:10]])
    assert found[9] == 1.0 and found[10] == 1.0 and found[30] == pytest.approx(math.sqrt(10 / 30))
    wsd = factors(schedule("wsd", warmup_steps=4, decay_share=0.25, final_factor=0.1))
    assert wsd[3:30] == [1.0] * 27 and wsd[-1] == pytest.approx(0.1) and wsd == sorted(wsd[:4]) + wsd[4:]
    assert wsd[30:] == sorted(wsd[30:], reverse=True)
    first = factors(schedule("one-cycle"))
    assert max(first) <= 1.0 and first[0] == pytest.approx(0.04) and first[-1] == pytest.approx(4e-6)


@pytest.mark.parametrize("name", ["polynomial", "wsd", "step", "inverse-sqrt"])
def test_warm_up(name: str) -> None:
    assert factors(schedule(name, warmup_steps=4))[:4] == [0.25, 0.5, 0.75, 1.0]


def test_torchs_own_by_name() -> None:
    exponential = UserSchedule("torch.optim.lr_scheduler:ExponentialLR", {"gamma": 0.9})
    expected = of_torch(lr_scheduler.ExponentialLR, gamma=0.9)
    assert exponential.factor(7, STEPS) == pytest.approx(expected[7]), "a resume asks for a later one first"
    assert factors(exponential) == pytest.approx(expected)


OWN = """
import math
import torch

def sawtooth(step, steps, period=5):
    return 1 - step % period / period

def made(optimizer, milestones):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.5)

def nothing(step, steps):
    return None
"""


@pytest.mark.thorough
def test_ones_own_in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_schedules.py").write_text(OWN)

    def rates(schedule: dict[str, Any], steps: int = 8) -> list[float]:
        job = {**TINY, "job": {**TINY["job"], "steps": steps}, "schedule": schedule}
        hpctrain.run(job)
        return [json.loads(line)["lr"] / 0.01 for line in Path("out/metrics.jsonl").read_text().splitlines()]

    saw = {"name": "own_schedules:sawtooth", "period": 4}
    rates(saw, steps=3)
    assert rates(saw) == pytest.approx([1, 0.75, 0.5, 0.25] * 2), "through a resume"
    step = {"name": "own_schedules:made", "milestones": [2, 5]}
    Path("out").rename("before")
    assert rates(step) == pytest.approx([1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25])
    Path("out").rename("then")
    for schedule, says in (
        ({"name": "own_schedules:nothing"}, "returned NoneType, expected a number"),
        ({"name": "own_schedules:sawtooth", "perod": 4}, "takes no argument 'perod'; did you mean 'period'"),
        ({"name": "torch.optim.lr_scheduler:ReduceLROnPlateau"}, "whose rate depends on the step alone"),
    ):
        with pytest.raises(HpctrainError, match=says):
            rates(schedule)


def test_an_unknown_one() -> None:
    with pytest.raises(UsageError, match="did you mean 'cosine'"):
        schedule("cosin")
