"""Trainings that a program steps from outside: against one process, their state, their errors, losses of ranks."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import ray_nodes
import torch
from hpctrain_ray import Learner, Training
from launching import wait_until
from points import batch, learner, made, plain
from ray_nodes import cluster, nodes

from hpctrain.api import TrainingError, UsageError

pytestmark = pytest.mark.nightly  # each starts a cluster, which takes half a minute on two cores

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("ranks", "tables"),
    [
        (2, {"sharding": {"stage": 0}}),
        (2, {"sharding": {"stage": 2}, "checkpoint": {"every_steps": 2, "asynchronous": True}}),
        (2, {"sharding": {"stage": 3}, "checkpoint": {}}),
        (2, {"parallelism": {"tensor": 2}}),
        (4, {"parallelism": {"tensor": 2}, "sharding": {"stage": 3}}),
    ],
    ids=str,
)
def test_steps_are_those_of_one_process(cluster: ray_nodes.Nodes, ranks: int, tables: dict[str, Any]) -> None:
    import ray

    losses, weights = plain(6)
    with Training(learner(), made(**tables), ranks, strategy="SPREAD") as training:
        assert len(set(training.nodes)) >= 2
        found = [training.train_step(batch(step))["loss"] for step in range(4)]
        state = training.get_state()
        assert state.step == 4
        found += [training.train_step(batch(step))["loss"] for step in (4, 5)]
        assert found == pytest.approx(losses, rel=1e-5)
        last = ray.get(training.weights())
        assert all(torch.allclose(last[name], value, atol=1e-6) for name, value in weights.items())
        assert training.evaluate(batch(0))["loss"] < losses[0]
        assert training.save() == training.save() == Path("out/checkpoints/step-00000006").absolute()
        training.set_state(state)
        assert training.step == 4 and training.get_state().files == state.files
        again = [training.train_step(batch(step)) for step in (4, 5)]
        assert [one["loss"] for one in again] == found[4:] and again[-1]["step"] == 6
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["loss"] for row in rows] == pytest.approx(found, rel=1e-6)


def test_references_go_to_the_ranks_without_the_program(cluster: ray_nodes.Nodes) -> None:
    import ray

    losses, _ = plain(3)
    with Training(learner(), made(), 2) as training:
        for step in range(3):
            points, labels = batch(step)
            parts = [ray.put((points[rows], labels[rows])) for rows in (slice(4), slice(4, 8))]
            assert training.train_step(parts)["loss"] == pytest.approx(losses[step], rel=1e-5)
        with pytest.raises(UsageError, match="found 1 references, expected one for each of 2 ranks"):
            training.train_step(parts[:1])


def test_errors_are_sentences(cluster: ray_nodes.Nodes) -> None:
    with (
        pytest.raises(UsageError, match="found a batch of 7 rows, expected a multiple of 2"),
        Training(learner(), made(), 2) as training,
    ):
        training.train_step(torch.zeros(7, 2))
    with Training(learner(), made(), 2) as training:
        points, labels = batch(0)
        with pytest.raises(TrainingError, match=r"rank \d on \S+ failed: ValueError: these are no points"):
            training.train_step((points / 0 * 0, labels))
        with pytest.raises(TrainingError, match="the training is closed"):
            training.train_step(batch(0))
    with pytest.raises(UsageError, match="which MPI does not know"):
        Training(learner(), made(communicator={"name": "mpi"}), 2)
    with pytest.raises(UsageError, match="unknown key 'bogus'"):
        Training(learner(), made(bogus={"x": 1}), 2)
    with pytest.raises(UsageError, match=r"Learner has no setup\(loop\)"):
        Training(Learner, made(), 2)
    with Training(learner(), made(job={"name": "short", "steps": 1}), 1) as training:
        assert training.train_step(batch(0))["step"] == 1
        with pytest.raises(TrainingError, match=r"it has 1 steps, all of \[job\] steps"):
            training.train_step(batch(1))


def lose(cluster: ray_nodes.Nodes, training: Training, what: str) -> None:
    wait_until(lambda: len(ray_nodes.learners()) == 2, 20, "the end of earlier ranks")
    if what == "a rank":
        ray_nodes.learners()[0].kill()
    else:
        cluster.kill(cluster.name(training.nodes[1]))
    wait_until(lambda: len(ray_nodes.learners()) < 2, 20, "the end of a rank")


@pytest.mark.parametrize("what", ["a rank", "a raylet"])
def test_what_is_lost_is_placed_anew_and_goes_on_from_the_newest_checkpoint(
    cluster: ray_nodes.Nodes, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    losses, _ = plain(7)
    with Training(learner(), made(), 2, strategy="STRICT_SPREAD") as training:
        for step in range(5):
            training.train_step(batch(step))
        lose(cluster, training, what)
        told = training.train_step(batch(4))
        assert told["step"] == 5 and told["loss"] == pytest.approx(losses[4], rel=1e-5), capfd.readouterr()
    said = capfd.readouterr().err
    assert "was lost in train: killed, out of memory" in said and "restart 1 of 3" in said


def test_a_loss_after_set_state_goes_back_to_that_state(cluster: ray_nodes.Nodes) -> None:
    """And not to a newer checkpoint, which is of another course."""
    losses, _ = plain(4)
    with Training(learner(), made(), 2, strategy="STRICT_SPREAD") as training:
        training.train_step(batch(0))
        first = training.get_state()
        for _ in range(4):
            training.train_step(batch(9))
        training.save()
        training.set_state(first)
        training.train_step(batch(1))
        lose(cluster, training, "a rank")
        assert training.evaluate(batch(1))["loss"] == pytest.approx(losses[1], rel=1e-5) and training.step == 1
        found = [training.train_step(batch(step)) for step in (1, 2)]
        lose(cluster, training, "a rank")
        found.append(training.train_step(batch(2)))
    assert [one["loss"] for one in found] == pytest.approx([losses[1], losses[2], losses[2]], rel=1e-5)
    assert [one["step"] for one in found] == [2, 3, 3]


def test_losses_have_an_end(cluster: ray_nodes.Nodes) -> None:
    with Training(learner(), made(), 2, restarts=1) as training:
        training.train_step(batch(0))
        lose(cluster, training, "a rank")
        assert training.train_step(batch(0))["step"] == 1
        lose(cluster, training, "a rank")
        with pytest.raises(TrainingError, match=r"was lost in .*restarts = 1 are used up"):
            training.train_step(batch(1))
