"""A job that loses a node, or its nodes to a more urgent job, is requeued and ends as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import JobFile
from launching import hpctrain, wait_until

from slurm.cluster import Cluster, temporary_cluster

pytestmark = pytest.mark.timeout(300)

STEPS = 40
TO = ("--to", "slurm", "--nodes", "2", "--set", "plugins.load=['slow']")
RUN = hpctrain("run", "job.toml")


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    """A Slurm that notices soon that a node is silent."""
    with temporary_cluster(node_timeout=10) as made:
        yield made


@pytest.fixture
def job(tmp_path: Path) -> JobFile:
    """A job that takes ten seconds with the plugin `slow`."""
    return JobFile(tmp_path).sleeps(0.25).set(job={"steps": STEPS}, checkpoint={"every_steps": 7})


@pytest.fixture(scope="module")
def straight(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two undisturbed ranks."""
    job = JobFile(tmp_path_factory.mktemp("straight")).set(job={"steps": STEPS})
    done = cluster.run(["srun", "-K", "-N2", "-n2", "--mpi=pmi2", *RUN], job.directory)
    assert done.code == 0, done
    return job.losses()


def submit(cluster: Cluster, job: JobFile) -> str:
    done = cluster.hpctrain(job.directory, "submit", "job.toml", *TO)
    assert done.code == 0, done
    return done.out.split(",")[0].split()[-1]


def output(job: JobFile, number: str) -> str:
    path = job.output / f"slurm-{number}.out"
    return path.read_text() if path.exists() else "no output"


def wait_for_end(cluster: Cluster, number: str) -> dict[str, str]:
    ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")
    wait_until(lambda: cluster.job(number).get("JobState") in ended, 180, f"job {number} ends")
    return cluster.job(number)


@pytest.mark.nightly
def test_preempted_by_a_more_urgent_job(cluster: Cluster, job: JobFile, straight: list[float]) -> None:
    number = submit(cluster, job)
    try:
        job.wait_for_steps(5)
        words = ["sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap=sleep 3"]
        urgent = cluster.ask(*words)
        assert urgent.isdigit(), urgent
        assert wait_for_end(cluster, urgent)["JobState"] == "COMPLETED"
        found = wait_for_end(cluster, number)
    finally:
        cluster.empty()
    assert found["JobState"] == "COMPLETED" and found["Restarts"] != "0", (found, output(job, number))
    assert "stopped at step" in output(job, number)  # it saved before it left
    assert job.losses() == straight


@pytest.mark.nightly
def test_a_node_that_dies(own: Cluster, job: JobFile, straight: list[float]) -> None:
    number = submit(own, job)
    job.wait_for_steps(10)
    own.kill_node("node2")
    try:
        wait_until(lambda: own.job(number).get("Restarts") == "1", 90, "a requeue")
    finally:
        own.revive_node("node2")
    found = wait_for_end(own, number)
    assert found["JobState"] == "COMPLETED", (found, output(job, number))
    assert job.losses() == straight


@pytest.mark.nightly
def test_a_node_that_dies_before_slurm_notices(cluster: Cluster, job: JobFile, straight: list[float]) -> None:
    """The watchdog ends the job; its script finds that a node starts nothing, and requeues it."""
    job.set(watchdog={"timeout_seconds": 5})
    number = submit(cluster, job)
    job.wait_for_steps(10)
    cluster.kill_node("node2")
    try:
        wait_until(lambda: cluster.job(number).get("Restarts") == "1", 90, "a requeue")
    finally:
        cluster.revive_node("node2")
    try:
        found = wait_for_end(cluster, number)
    finally:
        cluster.empty()
    assert found["JobState"] == "COMPLETED", (found, output(job, number))
    assert "missing: rank 1 on node2 has sent no heartbeat" in output(job, number)
    assert job.losses() == straight
    wait_until(lambda: cluster.ask("sinfo", "-h", "-o", "%T %D") == "idle 2", 60, "two idle nodes")
