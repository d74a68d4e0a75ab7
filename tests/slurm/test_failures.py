"""Failures on one node of two: one sentence or one traceback that names rank and node, and a prompt end."""

from __future__ import annotations

import time

import pytest
from jobs import JobFile
from launching import hpctrain

from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(150)

FOUR = ["srun", "-K", "-N2", "-n4", "--ntasks-per-node=2"]
TWO = ["srun", "-K", "-N2", "-n2"]
RUN = hpctrain("run", "job.toml")
with_and_without_mpi = pytest.mark.parametrize("mpi", [["--mpi=pmi2"], []], ids=["mpi", "gloo"])


def write_on(cluster: Cluster, node: str, name: str, text: str) -> None:
    """A file on the node's own disk."""
    words = ["srun", "-w", node, "-n1", "sh", "-c", 'printf %s "$1" >"$2"', "sh", text, str(cluster.local / name)]
    done = cluster.run(words, cluster.local)
    assert done.code == 0, done


@pytest.mark.nightly
@with_and_without_mpi
def test_an_exception_on_one_rank_is_told_once(cluster: Cluster, job: JobFile, mpi: list[str]) -> None:
    (job.directory / "faulty.py").write_text(
        "from pathlib import Path\n"
        "import torch.distributed as dist\n"
        "from hpctrain.api import hookimpl\n"
        "@hookimpl\n"
        "def hpctrain_step_end(step, metrics):\n"
        "    if step == 2 and dist.get_rank() == 3:\n"
        "        Path('raised').touch()\n"
        "        raise ZeroDivisionError('on purpose')\n"
    )
    job.set(plugins={"load": ["faulty"]}, job={"steps": 10**6})
    done = cluster.run([*FOUR, *mpi, *RUN], job.directory)
    seconds = time.time() - (job.directory / "raised").stat().st_mtime
    assert done.code not in (0, 75) and seconds < 20, (seconds, str(done))
    assert done.err.count("raised ZeroDivisionError: on purpose in hpctrain_step_end, on rank 3 on node2") == 1, done
    assert "Traceback" not in done.err, done


@pytest.mark.cases(nightly=["gloo"], rest="thorough")
@with_and_without_mpi
def test_a_plugin_that_one_node_lacks(cluster: Cluster, job: JobFile, mpi: list[str]) -> None:
    hook = "from hpctrain.api import hookimpl\n@hookimpl\ndef hpctrain_step_end(step, metrics): pass\n"
    write_on(cluster, "node1", "on_one_node.py", hook)
    job.set(plugins={"load": ["on_one_node"]})
    done = cluster.run([*TWO, *mpi, *RUN], job.directory, env={"PYTHONPATH": str(cluster.local)})
    assert done.code == 3 and done.err.count("rank 1 on node2: ") == 1 and "on_one_node" in done.err, done
    assert "Traceback" not in done.err and not job.output.exists(), done


@pytest.mark.cases(nightly=["gloo"], rest="thorough")
@with_and_without_mpi
def test_other_data_on_one_node(cluster: Cluster, job: JobFile, mpi: list[str]) -> None:
    write_on(cluster, "node1", "text", "one and two " * 100)
    write_on(cluster, "node2", "text", "one and too " * 100)
    job.set(model={"vocab_size": 256})
    job.tables["dataset"] = {"name": "text", "files": [str(cluster.local / "text")]}
    job.write()
    done = cluster.run([*TWO, *mpi, *RUN], job.directory)
    assert done.code == 3 and done.err.count("is not the same on all ranks: rank 0 on node1") == 1, done
    assert "node2" in done.err and "Traceback" not in done.err, done


IMPATIENT = """
import os, time
from datetime import timedelta
from hpctrain.ranks import meeting
meeting.MEETING_TIMEOUT = timedelta(seconds=15)
if os.environ['SLURM_PROCID'] == os.environ.get('LATE'):
    time.sleep(100)
from hpctrain.cli import main
main()
"""
"""The command with a shorter timeout than the five minutes of a real run, and with a rank that does not come."""


@pytest.mark.nightly
def test_a_rank_that_never_joins_is_named(cluster: Cluster, job: JobFile) -> None:
    """Without MPI: with it, MPI_Init itself would wait, and nothing of hpctrain runs meanwhile."""
    (job.directory / "impatient.py").write_text(IMPATIENT)
    done = cluster.run([*FOUR, RUN[0], "impatient.py", *RUN[3:]], job.directory, env={"LATE": "3"})
    assert done.code not in (0, 75) and done.err.count(" waited 15 s for rank 3 of 4 to join") == 1, done
    assert "rank 0 on node1 waited" in done.err and "for rank 0" not in done.err, done


@pytest.mark.nightly
def test_a_rank_that_is_stuck_in_a_plugin_is_named(cluster: Cluster, job: JobFile) -> None:
    """Under MPI, and the job ends: MPI_Finalize would wait for that rank, too."""
    (job.directory / "impatient.py").write_text(IMPATIENT)
    (job.directory / "stuck.py").write_text(
        "import os, time\nfrom hpctrain.api import hookimpl\n"
        "if os.environ['SLURM_PROCID'] == '1': time.sleep(100)\n"
        "@hookimpl\ndef hpctrain_step_end(step, metrics): pass\n"
    )
    job.set(plugins={"load": ["stuck"]})
    done = cluster.run([*TWO, "--mpi=pmi2", RUN[0], "impatient.py", *RUN[3:]], job.directory)
    assert done.code not in (0, 75) and done.err.count(" waited 15 s for rank 1 of 2 to join") == 1, done
