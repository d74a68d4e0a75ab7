"""A run with every logger whose processes are killed in the middle, and which goes on: each reader sees each step once."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from jobs import JobFile
from launching import KILL, hpctrain, run, started, wait_until
from logged import histories, read_offline, scalars, table

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


@pytest.mark.nightly
def test_a_killed_run_that_goes_on_has_each_step_once_in_every_service(job: JobFile) -> None:
    for package in PACKAGES:
        pytest.importorskip(package, reason=f"needs hpctrain[{package}]")
    job.tables["logger"] = [{"name": name} for name in ("csv", *PACKAGES)]
    job.set(job={"steps": 10**6}, checkpoint={"every_steps": 50, "keep": 2})
    with started(hpctrain("run", "job.toml"), job.directory) as command:
        wait_until(lambda: (job.output / "mlflow" / "run-id").exists(), 100, "MLflow's run")
        begun = len(job.rows())
        wait_until(lambda: len(job.rows()) > begun + 100 and len(job.rows()) % 50 > 10, 60, "steps after a checkpoint")
        os.kill(command.process.pid, KILL)
        assert command.finish(60).code == -KILL
    reached = job.rows()[-1]["step"]
    last = reached + 20
    assert run(hpctrain("run", "job.toml", "--set", f"job.steps={last}"), job.directory).code == 0
    truth = {row["step"]: row["loss"] for row in job.rows()}
    assert truth.keys() == {*range(1, last + 1)}
    begin = reached - reached % 50  # the checkpoint

    assert {int(row["step"]): float(row["loss"]) for row in table("metrics.csv", job.output)} == truth
    shown = scalars(job.output / "events")["loss"]
    assert [step for step, _ in shown] == [*truth] and [value for _, value in shown] == pytest.approx([*truth.values()])
    pieces = sorted(job.output.glob("wandb/offline-*/*.wandb"))
    sent = [(row["step"], row["loss"]) for piece in pieces for row in read_offline(piece)[1]]
    assert len(pieces) == 2 and all(one < other for (one, _), (other, _) in pairwise(sent))
    assert {*range(begin + 1, last + 1)} <= {step for step, _ in sent} and dict(sent).items() <= truth.items()
    stored = histories(f"sqlite:///{job.output}/mlflow/mlflow.db")[1]["loss"]
    assert {*range(reached + 1, last + 1)} <= stored.keys() and stored.items() <= truth.items()
