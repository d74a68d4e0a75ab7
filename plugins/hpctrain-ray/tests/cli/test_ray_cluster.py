"""The examples on a Ray cluster of several raylets, and what is lost there; the other files have each case by itself, at night."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import ray_nodes
from hpctrain_ray import Training
from launching import Finished, hpctrain, wait_until
from launching import run as typed
from points import batch, learner, made, plain
from ray_nodes import cluster, nodes

EXAMPLES = Path(__file__).parents[2] / "examples"


def command(cluster: ray_nodes.Nodes, *words: str) -> Finished:
    done = typed(words, Path.cwd(), 120, {"RAY_ADDRESS": cluster.address})
    assert done.code == 0, done
    return done


def losses(output: str) -> list[float]:
    rows = [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "grad_norm" in row]


@pytest.mark.thorough
def test_the_example_is_submitted_and_has_the_losses_of_one_machine(cluster: ray_nodes.Nodes) -> None:
    settings = ("--set", "communicator.name=gloo", "--set")
    command(cluster, *hpctrain("submit", "--to", "ray", str(EXAMPLES / "train.toml"), *settings, "job.output_dir=ray"))
    wait_until(Path("ray/ray.ended.json").exists, 120, "the end of the job")
    assert "ray job hpctrain-" in (done := command(cluster, *hpctrain("status", "ray"))).out and "done" in done.out, (
        done
    )
    here = command(cluster, *hpctrain("run", str(EXAMPLES / "train.toml"), "-n", "2", *settings, "job.output_dir=here"))
    assert len(losses("ray")) == 40 and losses("ray") == losses("here"), here


@pytest.mark.nightly
def test_steps_are_those_of_one_process_also_after_a_rank_was_killed(
    cluster: ray_nodes.Nodes, capfd: pytest.CaptureFixture[str]
) -> None:
    expected, _ = plain(7)
    with Training(learner(), made(sharding={"stage": 2}), 2, strategy="STRICT_SPREAD") as training:
        found = [training.train_step(batch(step)) for step in range(5)]
        ray_nodes.learners()[0].kill()  # the only ones: the test before has waited for the end of its own
        found[4:] = [training.train_step(batch(step)) for step in (4, 5)]
        state = training.get_state()
        training.train_step(batch(8))
        training.set_state(state)
        found.append(training.train_step(batch(6)))
    assert [one["loss"] for one in found] == pytest.approx(expected, rel=1e-5)
    assert [one["step"] for one in found] == [1, 2, 3, 4, 5, 6, 7]
    assert "restart 1 of 3" in capfd.readouterr().err


@pytest.mark.nightly
def test_the_return_of_ppo_rises(cluster: ray_nodes.Nodes) -> None:
    done = command(cluster, sys.executable, str(EXAMPLES / "ppo.py"), str(EXAMPLES / "ppo.toml"), "30")
    rewards = [float(found) for found in re.findall(r"reward (\S+)", done.out)]
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 2
