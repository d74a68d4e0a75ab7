"""Trainings that a program steps from outside: against one process, their state, their errors, losses of ranks, and PPO."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_nodes
import torch
from hpctrain_ray import Learner, Training
from launching import run as typed
from launching import wait_until
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.api import TrainingError, UsageError

pytestmark = pytest.mark.nightly  # each starts a cluster, which takes half a minute on two cores

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def cluster() -> Iterator[ray_nodes.Nodes]:
    made = ray_nodes.shared()
    made.complete()
    yield made
    wait_until(lambda: not ray_nodes.ranks(), 15, "ranks that end")


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def made(stage: int = 0) -> dict[str, Any]:
    return {
        "job": {"name": "outside", "steps": 100, "output_dir": f"out-{stage}"},
        "sharding": {"stage": stage},
        "checkpoint": {"every_steps": 2},
    }


def learner() -> type[Learner]:
    """A class that its pickle carries: the workers can't import this module."""

    class Points(Learner):
        def setup(self, loop: Any) -> None:
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
            self.model, self.optimizer = loop.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

        def loss(self, batch: Any) -> torch.Tensor:
            points, labels = batch
            if points.isnan().any():
                raise ValueError("these are no points")
            return cross_entropy(self.model(points), labels)

    return Points


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    points = torch.randn(8, 2, generator=torch.Generator().manual_seed(step))
    return points, (points.prod(1) > 0).long()


def plain(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and weights of a loop of torch's in this process."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        points, labels = batch(step)
        loss = cross_entropy(net(points), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net.state_dict()


@pytest.mark.parametrize(
    "stage", [pytest.param(0, marks=pytest.mark.thorough), 2, pytest.param(3, marks=pytest.mark.thorough)]
)
def test_steps_are_those_of_one_process(cluster: ray_nodes.Nodes, stage: int) -> None:
    import ray

    losses, weights = plain(6)
    with Training(learner(), made(stage), 2, strategy="STRICT_SPREAD") as training:
        assert len(set(training.nodes)) == 2
        found = [training.train_step(batch(step))["loss"] for step in range(4)]
        state = training.get_state()
        assert state.step == 4
        found += [training.train_step(batch(step))["loss"] for step in (4, 5)]
        assert found == pytest.approx(losses, rel=1e-5)
        last = ray.get(training.weights())
        assert all(torch.allclose(last[name], value, atol=1e-6) for name, value in weights.items())
        assert training.evaluate(batch(0))["loss"] < losses[0]
        training.set_state(state)
        assert training.step == 4
        again = [training.train_step(batch(step)) for step in (4, 5)]
        assert [one["loss"] for one in again] == found[4:] and again[-1]["step"] == 6
        assert training.save().name.endswith("06")
    rows = [json.loads(line) for line in Path(f"out-{stage}/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows] == pytest.approx(found, rel=1e-6)


def test_errors_are_sentences(cluster: ray_nodes.Nodes) -> None:
    with (
        pytest.raises(UsageError, match="found a batch of 7 rows, expected a multiple of 2"),
        Training(learner(), made(), 2) as training,
    ):
        training.train_step(torch.zeros(7, 2))
    with Training(learner(), made(), 2) as training:
        points, labels = batch(0)
        with pytest.raises(TrainingError, match=r"rank \d failed in train on .*ValueError: .*these are no points"):
            training.train_step((points / 0 * 0, labels))
        with pytest.raises(TrainingError, match="the training is closed"):
            training.train_step(batch(0))
    with pytest.raises(TrainingError, match="rank 0: job: unknown key 'bogus'"):
        Training(learner(), {**made(), "bogus": {"x": 1}}, 2)


@pytest.mark.parametrize("what", ["a rank", pytest.param("a raylet", marks=pytest.mark.thorough)])
def test_a_lost_rank_is_replaced_from_the_newest_checkpoint(
    cluster: ray_nodes.Nodes, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    losses, _ = plain(6)
    with Training(learner(), made(), 2, strategy="STRICT_SPREAD") as training:
        for step in range(5):
            training.train_step(batch(step))
        if what == "a rank":
            ray_nodes.learners()[0].kill()
        else:
            cluster.kill(cluster.name(training.nodes[1]))
        told = training.train_step(batch(4))
        assert told["step"] == 5 and told["loss"] == pytest.approx(losses[4], rel=1e-5), capfd.readouterr()
    assert "restart 1 of 3" in capfd.readouterr().err


def test_the_return_of_ppo_rises(cluster: ray_nodes.Nodes, tmp_path: Path) -> None:
    words = [sys.executable, str(EXAMPLES / "ppo.py"), str(EXAMPLES / "ppo.toml"), "30"]
    done = typed(words, tmp_path, 100, {"RAY_ADDRESS": cluster.address})
    assert done.code == 0, done
    rewards = [float(found) for found in re.findall(r"reward (\S+)", done.out)]
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 2
