"""`hpctrain submit`, `status` and `cancel` with a real Slurm. What the script does after a signal is in test_batch.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import JobFile
from launching import Finished, wait_until

from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(240)

TO = ("--to", "slurm", "--nodes", "2")
SLOW = ("--set", "plugins.load=['slow']")
SECRET = "a-key-that-no-file-may-hold"


@pytest.fixture
def job(tmp_path: Path) -> JobFile:
    """A job that takes seconds with the plugin `slow`."""
    (tmp_path / "slow.py").write_text(
        "import time\nfrom hpctrain.api import hookimpl\n"
        "@hookimpl\ndef hpctrain_step_end(step, metrics): time.sleep(0.2)\n"
    )
    return JobFile(tmp_path)


@pytest.fixture(autouse=True)
def emptied(cluster: Cluster) -> Iterator[None]:
    yield
    cluster.empty()


def ask(cluster: Cluster, job: JobFile, *words: str) -> Finished:
    return cluster.hpctrain(job.directory, *words)


def submit(cluster: Cluster, job: JobFile, *words: str) -> list[str]:
    """The numbers of the submitted jobs."""
    done = ask(cluster, job, "submit", "job.toml", *TO, *words)
    assert done.code == 0 and done.out.count("\n") == 1, done
    found = re.fullmatch(r"submitted    slurm job ([\d_ ]+), in \S+\n", done.out)
    assert found, done
    return found[1].split()


def status(cluster: Cluster, job: JobFile, directory: str = "out") -> list[str]:
    """What `hpctrain status` says after the run's directory, a line for each run."""
    done = ask(cluster, job, "status", directory)
    assert done.code == 0, done
    return [line.split(": ", 1)[1] for line in done.out.splitlines()]


def wait_for_state(cluster: Cluster, number: str, *states: str) -> None:
    wait_until(lambda: cluster.job(number).get("JobState") in states, 120, f"job {number} is {' or '.join(states)}")


def output(job: JobFile, number: str) -> str:
    path = job.output / f"slurm-{number}.out"
    return path.read_text() if path.exists() else "no output"


@pytest.mark.nightly
def test_the_metrics_are_there_and_no_secret(
    cluster: Cluster, job: JobFile, losses_alone: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    number, *_ = submit(cluster, job, "--ranks-per-node", "2", "--time", "10m")
    wait_for_state(cluster, number, "COMPLETED", "FAILED")
    assert status(cluster, job) == [f"slurm job {number}: done, step 4 of 4"], output(job, number)
    assert job.losses() == pytest.approx(losses_alone, rel=2e-6)
    assert "4 (mpi)" in output(job, number)
    held = [path for path in job.directory.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert held == []
    done = ask(cluster, job, "cancel", "out")
    assert done.code == 0 and "done already" in done.out, done


@pytest.mark.nightly
def test_running_is_not_submitted_again_and_cancel_ends_it(cluster: Cluster, job: JobFile) -> None:
    number, *_ = submit(cluster, job, "--set", "job.steps=100000", *SLOW)
    wait_until(lambda: (job.output / "metrics.jsonl").exists(), 90, "the first step")
    (running,) = status(cluster, job)
    assert re.fullmatch(rf"slurm job {number}: running on node\[1-2\] for \S+, step \d+ of 100000", running), running
    again = ask(cluster, job, "submit", "job.toml", *TO)
    assert again.code == 2 and f"found slurm job {number}, which has not ended" in again.err, again
    assert "hpctrain cancel" in again.err and cluster.ask("squeue", "-h", "-o", "%A") == number, again
    assert "told to end" in ask(cluster, job, "cancel", "out").out
    wait_until(lambda: not cluster.ask("squeue", "-h"), 60, "an empty queue")
    assert status(cluster, job)[0].startswith(f"slurm job {number}: cancelled, step "), output(job, number)
    assert list(job.output.glob("checkpoints/step-*")), output(job, number)


@pytest.mark.nightly
def test_a_job_that_fails_and_one_that_waits(cluster: Cluster, job: JobFile) -> None:
    (job.directory / "faulty.py").write_text(
        "from hpctrain.api import hookimpl\n@hookimpl\ndef hpctrain_step_end(step, metrics): raise ValueError('mine')\n"
    )
    waiting, *_ = submit(
        cluster, job, "--set", "job.output_dir=later", "--set", "scheduler.slurm.extra=['--begin=now+1hour']"
    )
    number, *_ = submit(cluster, job, "--set", "plugins.load=['faulty']", "--set", "scheduler.slurm.mpi=none")
    assert status(cluster, job, "later") == [f"slurm job {waiting}: pending (BeginTime)"]
    wait_for_state(cluster, number, "FAILED")
    listed = ask(cluster, job, "runs", ".", "--json")
    states = {one["job"]["id"]: (one["state"], one["detail"]) for one in json.loads(listed.out)}
    assert states == {waiting: ("pending", "(BeginTime)"), number: ("failed", "(FAILED)")} and listed.err == "", listed
    (said,) = status(cluster, job)
    assert re.match(rf"slurm job {number}: failed \(FAILED, exit code \d+\)", said), output(job, number)
    refused = ask(cluster, job, "submit", "job.toml", *TO, "--set", "job.output_dir=next", "--after", "out")
    assert refused.code == 2 and f"found slurm job {number} failed" in refused.err, refused


@pytest.mark.nightly
def test_an_array_of_three(cluster: Cluster, job: JobFile) -> None:
    rates = ("0.1", "0.01", "0.001")
    numbers = submit(cluster, job, "--array", f"optimizer.lr={','.join(rates)}")
    base = numbers[0].partition("_")[0]
    assert numbers == [f"{base}_{task}" for task in range(3)]
    wait_until(lambda: not cluster.ask("squeue", "-h"), 120, "an empty queue")
    assert status(cluster, job) == [f"slurm job {number}: done, step 4 of 4" for number in numbers]
    found = [job.rows(f"out/optimizer.lr={rate}")[-1]["lr"] for rate in rates]
    assert found == [float(rate) for rate in rates]
    listed = {one["job"]["id"]: one for one in json.loads(ask(cluster, job, "runs", "out", "--json").out)}
    assert {id: one["state"] for id, one in listed.items()} == dict.fromkeys(numbers, "done"), listed
    assert status(cluster, job, "out/optimizer.lr=0.01") == [f"slurm job {numbers[1]}: done, step 4 of 4"]


@pytest.mark.nightly
def test_a_chain_of_two_waits_for_a_requeued_job(cluster: Cluster, job: JobFile) -> None:
    """The first job is requeued once: its end with 75 must not start the second."""
    first, *_ = submit(cluster, job, "--set", "job.steps=30", *SLOW)
    second, *_ = submit(cluster, job, "--set", "job.output_dir=second", "--after", "out")
    assert cluster.job(second)["Dependency"].startswith("afterok:"), cluster.job(second)
    wait_until(lambda: (job.output / "metrics.jsonl").exists(), 90, "the first step")
    cluster.ask("scancel", "--signal=USR1", first)
    wait_until(lambda: cluster.job(first)["Restarts"] == "1", 60, "the requeue")
    assert status(cluster, job, "second") == [f"slurm job {second}: pending (Dependency)"]
    wait_for_state(cluster, second, "COMPLETED", "FAILED", "CANCELLED")
    assert status(cluster, job)[0].startswith(f"slurm job {first}: done"), output(job, first)
    assert status(cluster, job, "second") == [f"slurm job {second}: done, step 4 of 4"]
    begun = min(row["time"] for row in job.rows("second"))
    assert begun > max(row["time"] for row in job.rows()), "the second began before the first was done"


@pytest.mark.thorough
def test_slurms_own_sentence_is_shown(cluster: Cluster, job: JobFile) -> None:
    wrong = ask(cluster, job, "submit", "job.toml", *TO, "--set", "scheduler.slurm.partition=nope")
    assert wrong.code == 2 and wrong.out == "", wrong
    assert "sbatch refused the job: sbatch: error: invalid partition specified: nope" in wrong.err, wrong
    assert ask(cluster, job, "status", "out").code == 2
