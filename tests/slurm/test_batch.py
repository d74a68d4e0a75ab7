"""Jobs that are stopped, killed or cancelled, and then continue: with the script of `hpctrain submit` and with srun alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import JobFile
from launching import KILL, Started, hpctrain, wait_until

from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(180)

STEPS = 40
TWO = ["srun", "-K", "-N2", "-n2"]
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
RUN = hpctrain("run", "job.toml")
SLOW = "plugins.load=['slow']"
SLOWLY = [*RUN, "--set", SLOW]


@pytest.fixture
def job(tmp_path: Path) -> JobFile:
    """A job that takes seconds with the plugin `slow`, and is saved only when it is stopped and every 7 steps."""
    return JobFile(tmp_path).sleeps(0.1).set(job={"steps": STEPS}, checkpoint={"every_steps": 7})


@pytest.fixture(scope="module")
def straight(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of two uninterrupted ranks, byte for byte."""
    job = JobFile(tmp_path_factory.mktemp("straight")).set(job={"steps": STEPS})
    done = cluster.run([*TWO, "--mpi=pmi2", *RUN], job.directory)
    assert done.code == 0, done
    return loss_texts(job)


def loss_texts(job: JobFile) -> list[str]:
    path = job.output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split('"loss": ')[1].split(",")[0] for line in lines]


def ranks_of(command: Started) -> list[int]:
    """The process numbers of the ranks, in order of rank."""
    found = {}
    for process in command.members():
        if "hpctrain" in process.cmdline() and "python" in process.name():
            found[int(process.environ()["SLURM_PROCID"])] = process.pid
    return [found[rank] for rank in sorted(found)]


@pytest.fixture
def submitted(cluster: Cluster, job: JobFile) -> Iterator[str]:
    """The number of a job that trains `job` slowly on two nodes; after the test no job is left."""
    words = ["--to", "slurm", "--nodes", "2", "--set", "scheduler.slurm.cpus_per_rank=1", "--set", SLOW]
    done = cluster.hpctrain(job.directory, "submit", "job.toml", *words)
    assert done.code == 0, done
    yield done.out.split(",")[0].split()[-1]
    cluster.empty()


@pytest.mark.thorough
def test_the_batch_script_goes_on_after_its_signal(
    cluster: Cluster, job: JobFile, straight: list[str], submitted: str
) -> None:
    job.wait_for_steps(10)
    cluster.ask("scancel", "--signal=USR1", submitted)
    wait_until(lambda: cluster.job(submitted)["JobState"] in ENDED, 120, "the job's end")
    said = (job.output / f"slurm-{submitted}.out").read_text()
    end = cluster.job(submitted)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "1"), said
    assert said.count("stopped at step") == 1 and said.count("resuming") == 1, said
    assert loss_texts(job) == straight


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_time_limit_comes_until_the_job_is_done(cluster: Cluster, job: JobFile, straight: list[str]) -> None:
    """The limit is a minute, Slurm's shortest; it may send the signal up to a minute early."""
    job.sleeps(1.0)
    words = [
        "--to",
        "slurm",
        "--nodes",
        "2",
        "--time",
        "60s",
        "--set",
        "scheduler.slurm.save_seconds=30",
        "--set",
        SLOW,
    ]
    done = cluster.hpctrain(job.directory, "submit", "job.toml", *words)
    assert done.code == 0, done
    number = done.out.split(",")[0].split()[-1]
    try:
        wait_until(lambda: cluster.job(number)["JobState"] in ENDED, 300, "the job's end")
        end, said = cluster.job(number), (job.output / f"slurm-{number}.out").read_text()
    finally:
        cluster.empty()
    assert end["JobState"] == "COMPLETED" and int(end["Restarts"]) >= said.count("stopped at step") > 0, said
    assert loss_texts(job) == straight


@pytest.mark.nightly
def test_scancel_saves_and_ends(cluster: Cluster, job: JobFile, submitted: str) -> None:
    job.wait_for_steps(10)
    cluster.ask("scancel", submitted)
    wait_until(lambda: not cluster.ask("squeue", "-h"), 60, "an empty queue")
    said = (job.output / f"slurm-{submitted}.out").read_text()
    end = cluster.job(submitted)
    assert (end["JobState"], end["Restarts"]) == ("CANCELLED", "0"), said
    assert "stopped at step" in said, said


@pytest.mark.nightly
@pytest.mark.parametrize("mpi", [["--mpi=pmi2"], []], ids=["mpi", "gloo"])
def test_a_signal_to_the_step_saves_and_the_next_goes_on(
    cluster: Cluster, job: JobFile, straight: list[str], mpi: list[str]
) -> None:
    command = cluster.start([*TWO, *mpi, *SLOWLY], job.directory)
    try:
        job.wait_for_steps(10)
        steps = cluster.ask("squeue", "-h", "--steps", "-o", "%i").split()
        cluster.ask("scancel", "--signal=USR1", *steps)
        stopped = command.finish(60)
    finally:
        command.kill_all()
    assert stopped.code == 75 and "stopped at step" in stopped.out, stopped
    done = cluster.run([*TWO, *mpi, *RUN], job.directory)
    assert done.code == 0 and "resuming" in done.out, done
    assert loss_texts(job) == straight


@pytest.mark.nightly
@pytest.mark.parametrize("mpi", [["--mpi=pmi2"], []], ids=["mpi", "gloo"])
def test_a_killed_rank_ends_the_step_and_the_next_goes_on(
    cluster: Cluster, job: JobFile, straight: list[str], mpi: list[str]
) -> None:
    command = cluster.start([*TWO, *mpi, *SLOWLY], job.directory)
    try:
        job.wait_for_steps(10)
        os.kill(ranks_of(command)[1], KILL)
        killed = command.finish(30)
    finally:
        command.kill_all()
    assert killed.code not in (0, 75), killed
    done = cluster.run([*TWO, *mpi, *RUN], job.directory)
    assert done.code == 0 and "from step 7" in done.out, done
    assert loss_texts(job) == straight
