"""`hpctrain submit --to ray`, `status` and `cancel`, and the script and command that do the same by hand."""

from __future__ import annotations

import json
import sys

import pytest
import ray_nodes
from hpctrain_ray.options import RayOptions
from hpctrain_ray.scheduler import Ray
from jobs import JobFile
from launching import Finished, hpctrain, wait_until
from launching import run as typed
from ray_nodes import cluster, nodes

pytestmark = pytest.mark.nightly  # each starts a cluster, which takes half a minute on two cores


def command(cluster: ray_nodes.Nodes, job: JobFile, *words: str) -> Finished:
    done = typed(hpctrain(*words), job.directory, 120, {"RAY_ADDRESS": cluster.address})
    assert done.code == 0, done
    return done


def state(job: JobFile) -> str:
    """The state of the newest submission, in the scheduler's words."""
    id = json.loads((job.output / "submissions.jsonl").read_text().splitlines()[-1])["id"]
    told = Ray(RayOptions()).state(id)
    return f"{told.word} {told.detail}"


def ended(job: JobFile, seconds: float = 90) -> int:
    """The exit code of the newest submission, once it has ended."""
    path = job.output / "ray.ended.json"
    wait_until(path.exists, seconds, "the end of the job")
    return int(json.loads(path.read_text())["code"])


def test_a_submitted_job_lives_without_the_command_until_it_is_cancelled(
    cluster: ray_nodes.Nodes, job: JobFile
) -> None:
    job.sleeps(0.2).set(
        job={"steps": 4000}, plugins={"load": ["slow"]}, checkpoint={"every_steps": 5}, communicator={"name": "gloo"}
    )
    done = command(cluster, job, "submit", str(job.path), "--to", "ray", "--nodes", "2")
    assert "submitted    ray job hpctrain-" in done.out
    job.wait_for_steps(6)
    assert state(job).startswith("running on")
    ray_nodes.ranks()[0].kill()
    wait_until(lambda: starts_of(job) == 2, 90, "a second start")
    assert "running on" in command(cluster, job, "status", str(job.output)).out
    command(cluster, job, "cancel", str(job.output))
    assert ended(job) == 143
    assert state(job) == "cancelled (exit code 143)"
    assert "restart 1 of 3" in (job.output / "ray.out").read_text()
    assert numbered(job)


def numbered(job: JobFile) -> list[int]:
    """The steps of the job's rows, which must be those of one run."""
    found = [row["step"] for row in job.rows()]
    assert found == list(range(1, len(found) + 1))
    return found


def starts_of(job: JobFile) -> int:
    path = job.output / "starts.jsonl"
    return path.read_text().count('"ranks"') if path.exists() else 0


def test_a_supervisor_that_is_killed_starts_again_and_so_do_its_ranks(cluster: ray_nodes.Nodes, job: JobFile) -> None:
    job.sleeps(0.2).set(
        job={"steps": 60}, plugins={"load": ["slow"]}, checkpoint={"every_steps": 5}, communicator={"name": "gloo"}
    )
    command(cluster, job, "submit", str(job.path), "--to", "ray", "--nodes", "2")
    job.wait_for_steps(7)
    [supervisor] = ray_nodes.supervisors()
    supervisor.kill()
    assert ended(job, 120) == 0
    assert state(job) == "done " and len(numbered(job)) == 60 and starts_of(job) == 2


def test_a_job_saves_before_its_time_is_over_and_starts_again(cluster: ray_nodes.Nodes, job: JobFile) -> None:
    job.sleeps(0.2).set(
        job={"steps": 80}, plugins={"load": ["slow"]}, communicator={"name": "gloo"},
        scheduler={"ray": {"ranks_per_node": 2, "time": "60s", "save_seconds": 50}},
    )  # fmt: skip
    command(cluster, job, "submit", str(job.path))
    assert ended(job, 180) == 0
    assert len(numbered(job)) == 80 and starts_of(job) >= 2
    assert "restart" not in (job.output / "ray.out").read_text()


def test_a_job_without_room_waits_and_fails(cluster: ray_nodes.Nodes, job: JobFile) -> None:
    job.set(scheduler={"ray": {"cpus": 9, "placement_limit": 8}})
    command(cluster, job, "submit", str(job.path))
    assert "pending for room in the cluster" in state(job)
    assert ended(job) == 3
    assert "found no room on the Ray cluster within 8 s" in state(job)


def test_the_script_does_the_same_by_hand(cluster: ray_nodes.Nodes, job: JobFile) -> None:
    job.set(communicator={"name": "gloo"})
    command(cluster, job, "submit", str(job.path), "--to", "ray", "--ranks-per-node", "2")
    assert ended(job) == 0 and numbered(job)[-1] == 4
    sent = job.output / "job.submitted.toml"
    sent.write_text(sent.read_text().replace("steps = 4", "steps = 6"))
    done = typed(["sh", str(job.output / "submit.sh")], job.directory, 120, {"RAY_ADDRESS": cluster.address})
    assert done.code == 0 and "starting 2 ranks" in done.err and numbered(job)[-1] == 6, done


def test_without_a_cluster(job: JobFile) -> None:
    job.set(scheduler={"ray": {"address": "127.0.0.1:1"}})
    words = [sys.executable, "-m", "hpctrain_ray", str(job.path)]
    done = typed(words, job.directory, 120, {"RAY_gcs_rpc_server_connect_timeout_s": "2", "RAY_ADDRESS": ""})
    assert done.code == 3 and "found no Ray cluster at '127.0.0.1:1'" in done.err, done
    assert "Traceback" not in done.err


def test_a_wrong_job_is_told_by_its_ranks(cluster: ray_nodes.Nodes, job: JobFile) -> None:
    job.set(batch={"micro_size": 0})
    words = [sys.executable, "-m", "hpctrain_ray", str(job.path)]
    done = typed(words, job.directory, 120, {"RAY_ADDRESS": cluster.address})
    assert done.code == 2 and "micro_size" in done.err and "restart" not in done.err, done
