"""The guards of a run on several ranks: one rank's failure is everybody's, and the parameters tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from training import job, session_of

from hpctrain.api import Control, LiveModel, hookimpl
from hpctrain.base.errors import TrainingError
from hpctrain.ranks.signals import StopRequest
from hpctrain.training.loop import train

STAGES = [0, 3]


class Watch:
    """The rows, and all parameters after each step."""

    def __init__(self, ends_at: int | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.values: list[dict[str, Tensor]] = []
        self._ends_at = ends_at

    @hookimpl
    def hpctrain_step_end(self, metrics: dict[str, Any], model: LiveModel, control: Control) -> None:
        self.rows.append(dict(metrics))
        self.values.append({name: model.value(name).cpu() for name in model.shapes})
        if len(self.rows) == self._ends_at:
            control.stop("the test says so")

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.rows]

    def fails_at(self) -> int:
        """The number of steps before the first that a guard dealt with."""
        return next(place for place, row in enumerate(self.rows) if "guard" in row)

    def unchanged_by(self, place: int) -> bool:
        before, after = self.values[place - 1], self.values[place]
        return all(torch.equal(before[name], after[name]) for name in after)


def tables_of(root: Path, model: str, **tables: dict[str, Any]) -> dict[str, Any]:
    return job(
        **{
            "job": {"name": "guarded", "steps": 8, "output_dir": str(root)},
            "model": {"name": f"marked_samples:{model}", "loss": "torch.nn.functional:mse_loss"},
            "dataset": {"name": "marked_samples:data"},
            "optimizer": {"name": "adamw", "lr": 0.01, "weight_decay": 0.1},
            "batch": {"global_size": 48, "micro_size": 4},
            **tables,
        }
    )


def watched(tables: dict[str, Any], ends_at: int | None = None) -> Watch:
    watch = Watch(ends_at)
    with session_of(tables, watch) as session:
        train(session, StopRequest())
    return watch


@pytest.mark.cases(thorough=["3"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_not_finite_on_one_rank_is_left_out_on_all(root: Path, stage: int) -> None:
    tables = tables_of(root, "Broken", sharding={"stage": stage}, guard={"non_finite": "skip"})
    found = watched(tables)
    at = found.fails_at()
    assert 0 < at < 7 and found.rows[at]["guard"] == "non_finite" and found.rows[at]["skipped"]
    assert [row.get("skipped_steps", 0) for row in found.rows] == [int(place >= at) for place in range(8)]
    assert found.unchanged_by(at) and not found.unchanged_by(at - 1) and not found.unchanged_by(at + 1)


def test_the_sentence_names_rank_and_gradient(root: Path) -> None:
    with pytest.raises(TrainingError) as told:
        watched(tables_of(root, "Broken"))
    said = str(told.value)
    ranks = [rank for rank in range(dist.get_world_size()) if f"not finite is the loss of rank {rank} on " in said]
    assert len(ranks) == 1, said  # only one rank has the sample
    assert "first gradient in backward order that is not finite is that of layers.2.bias (Linear)" in said


@pytest.mark.cases(nightly=["3"], rest="thorough")
@pytest.mark.parametrize("stage", STAGES)
def test_a_rollback_goes_on_with_the_samples_that_follow_also_after_a_resume(root: Path, stage: int) -> None:
    def tables(name: str) -> dict[str, Any]:
        guard, checkpoint = {"non_finite": "rollback"}, {"every_steps": 2}
        return tables_of(root / name, "Broken", sharding={"stage": stage}, guard=guard, checkpoint=checkpoint)

    full = watched(tables("full"))
    at = full.fails_at()
    back = at // 2 * 2
    steps = [row["step"] for row in full.rows]
    assert steps == [*range(1, at + 2), *range(back + 1, 9)]
    before, after = full.values[back - 1], full.values[at + 1]
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert full.rows[-1]["rollbacks"] == 1 and full.rows[at + 1]["loss"] == full.rows[at + 1]["loss"]
    ends_at = at + 2  # after the rollback; the end of a run is saved
    first, rest = watched(tables("cut"), ends_at), watched(tables("cut"))
    assert first.losses[:at] == full.losses[:at] and first.losses[at + 1 :] + rest.losses == full.losses[at + 1 :]


@pytest.mark.thorough
@pytest.mark.parametrize("stage", STAGES)
def test_guards_that_never_fire_change_nothing(root: Path, stage: int) -> None:
    guard = {
        "non_finite": "skip", "loss_spike": {"factor": 50.0, "window": 2, "action": "skip"},
    }  # fmt: skip
    guarded = watched(tables_of(root / "a", "Model", sharding={"stage": stage}, guard=guard))
    plain = watched(tables_of(root / "b", "Model", sharding={"stage": stage}))
    assert guarded.losses == plain.losses and [row.keys() for row in guarded.rows] == [row.keys() for row in plain.rows]


class Drifts:
    """Rank 1 changes a parameter by a thousandth after step 3, as an optimizer or a hook does that differs by rank."""

    @hookimpl
    def hpctrain_step_end(self, step: int, model: LiveModel) -> None:
        if step == 3 and dist.get_rank() == 1:
            next(one for one in model.pieces if one.name == "layers.1.weight").tensor.data.mul_(1.001)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", ["stage 0", "stage 3, replicated"])
def test_replicas_that_drift_are_found_without_being_asked_for(root: Path, layout: str) -> None:
    ranks = dist.get_world_size()
    replicate = {"parallelism": {"replicate": 2 if ranks % 2 == 0 else ranks}} if "replicated" in layout else {}
    tables = tables_of(root, "Model", sharding={"stage": int(layout.split(",")[0][-1])}, job={"steps": 12}, **replicate)
    with pytest.raises(TrainingError) as told, session_of(tables, Drifts()) as session:
        train(session, StopRequest())
    said = str(told.value)
    assert said.startswith("after 10 steps ") and "weight" in said and "rank 1 on " in said, said
    assert "the last time after 2 steps" in said, said
