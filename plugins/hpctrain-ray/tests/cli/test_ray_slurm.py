"""The line of a batch script that makes a Ray cluster of a job of Slurm's, on a real Slurm of two nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import JobFile
from launching import hpctrain, run, wait_until
from slurm.cluster import NODES, Cluster, temporary_cluster

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(400)]

STRANGER = """
import os, sys, ray
for name in [name for name in os.environ if name.startswith("RAY_AUTH")]:
    del os.environ[name]
try:
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
except Exception as error:
    print("refused:", type(error).__name__, str(error)[:200].replace("\\n", " "))
else:
    print("let in:", ray.cluster_resources())
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with temporary_cluster() as made:
        yield made


def script_of(job: JobFile, command: str) -> Path:
    """A batch script that runs a command on a Ray cluster of both nodes."""
    script = job.directory / "batch.sh"
    line = f"srun --ntasks-per-node=1 {sys.executable} -m hpctrain_ray.cluster -- {command}"
    script.write_text(f"#!/bin/bash\n#SBATCH -N2\n#SBATCH -o out.txt\nexport HOME={job.directory}\n{line}\n")
    return script


def batch(slurm: Cluster, job: JobFile, command: str) -> tuple[int, str]:
    """The exit code and the output of such a script."""
    words = ["sbatch", "--wait", str(script_of(job, command))]
    done = slurm.run(words, job.directory, 300, {"OMP_NUM_THREADS": "1"})
    return done.code, (job.directory / "out.txt").read_text()


def test_a_job_trains_on_a_cluster_of_the_allocation(slurm: Cluster, job: JobFile) -> None:
    job.set(communicator={"name": "gloo"}, scheduler={"ray": {"nodes": 2, "strategy": "STRICT_SPREAD"}})
    (job.directory / "alone").mkdir()
    alone = JobFile(job.directory / "alone")
    alone.set(communicator={"name": "gloo"})
    done = run(hpctrain("run", "job.toml", "-n", "2"), alone.directory)
    assert done.code == 0, done
    (job.directory / "stranger.py").write_text(STRANGER)
    words = f"{sys.executable} stranger.py; {sys.executable} -m hpctrain_ray job.toml; exit $?"
    code, said = batch(slurm, job, f"bash -c '{words}'")
    assert code == 0, said
    assert job.losses() == alone.losses()
    start = json.loads((job.output / "starts.jsonl").read_text().splitlines()[0])
    assert sorted(start["hosts"]) == sorted(NODES)
    assert "refused:" in said and "let in:" not in said, said
    assert not list((job.directory / ".hpctrain").iterdir())
    assert slurm.ask("squeue", "-h") == ""


def test_a_signal_of_the_step_lets_the_ranks_save(slurm: Cluster, job: JobFile) -> None:
    job.sleeps(0.2).set(
        job={"steps": 4000}, plugins={"load": ["slow"]}, communicator={"name": "gloo"},
        scheduler={"ray": {"nodes": 2, "strategy": "STRICT_SPREAD"}},
    )  # fmt: skip
    script = script_of(job, f"{sys.executable} -m hpctrain_ray job.toml")
    done = slurm.run(["sbatch", "--parsable", str(script)], job.directory, 60, {"OMP_NUM_THREADS": "1"})
    number = done.out.strip()
    job.wait_for_steps(3, 200)
    slurm.ask("scancel", "--signal=USR1", number)
    wait_until(lambda: slurm.ask("squeue", "-h") == "", 90, "the end of the job")
    said = (job.directory / "out.txt").read_text()
    assert slurm.job(number)["ExitCode"] == "75:0", said
    assert [one.name for one in (job.output / "checkpoints").glob("step-*")] == [f"step-{len(job.rows()):08d}"], said
    assert not list((job.directory / ".hpctrain").iterdir())


def test_the_command_s_exit_code_is_the_line_s(slurm: Cluster, job: JobFile) -> None:
    code, said = batch(slurm, job, "bash -c 'exit 7'")
    assert code == 7, said
