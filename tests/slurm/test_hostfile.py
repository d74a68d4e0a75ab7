"""`hpctrain run --hostfile` inside an allocation: mpiexec reaches the nodes through srun."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from jobs import JobFile
from launching import KILL, Started, hpctrain

from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(180)

BOTH = ["salloc", "--quiet", "-N2", "--ntasks-per-node=2"]
RUN = hpctrain("run", "job.toml", "--hostfile", "hosts")


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    file = tmp_path / "hosts"
    file.write_text("# both nodes\nnode1 slots=2\nnode2:2  # as MPICH writes it\n")
    return file


@pytest.fixture
def slowly(job: JobFile) -> JobFile:
    """A job that takes seconds, and is saved only when it is stopped and every 7 steps."""
    return job.sleeps(0.1).set(job={"steps": 40}, checkpoint={"every_steps": 7}, plugins={"load": ["slow"]})


@pytest.mark.thorough
def test_two_ranks_on_each_of_two_nodes(cluster: Cluster, job: JobFile, hosts: Path, losses_alone: list[float]) -> None:
    done = cluster.run([*BOTH, *RUN], job.directory)
    assert done.code == 0 and "4 (mpi), 2 per node" in done.out, done
    assert "starting     4 ranks on node1, node2" in done.out and done.err == "", done
    assert job.losses() == pytest.approx(losses_alone, rel=2e-6)


def starter(command: Started) -> int:
    """The process number of `hpctrain run --hostfile`, below salloc."""
    return next(p.pid for p in command.members() if "--hostfile" in p.cmdline() and "python" in p.name())


@pytest.mark.nightly
def test_a_signal_saves_and_the_same_command_continues(cluster: Cluster, slowly: JobFile, hosts: Path) -> None:
    command = cluster.start([*BOTH, *RUN], slowly.directory)
    try:
        slowly.wait_for_steps(3)
        os.kill(starter(command), signal.SIGTERM)
        stopped = command.finish(60)
    finally:
        command.kill_all()
    assert stopped.code == 75 and "continue with: hpctrain run job.toml --hostfile hosts" in stopped.out, stopped
    assert len(list(slowly.output.glob("checkpoints/step-*"))) == 1, stopped
    done = cluster.run([*BOTH, *RUN], slowly.directory)
    assert done.code == 0 and "resuming" in done.out and len(slowly.losses()) == 40, done


@pytest.mark.thorough
def test_no_rank_outlives_its_starter(cluster: Cluster, slowly: JobFile, hosts: Path) -> None:
    command = cluster.start([*BOTH, *RUN, "--set", "job.steps=100000"], slowly.directory)
    try:
        slowly.wait_for_steps(3)
        os.kill(starter(command), KILL)
        command.finish(30)  # fails if a process is left; salloc's own code is 0
    finally:
        command.kill_all()


@pytest.mark.nightly
def test_a_killed_rank_is_told_with_its_node_and_starts_again(
    cluster: Cluster, slowly: JobFile, hosts: Path, losses_alone: list[float]
) -> None:
    (slowly.directory / "killing.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom hpctrain.api import hookimpl\n"
        "@hookimpl\ndef hpctrain_step_end(step):\n"
        "    if os.environ['RANK'] == '3' and step in (9, 16) and not Path(f'at-{step}').exists():\n"
        "        Path(f'at-{step}').touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    slowly.set(plugins={"load": ["killing"]}, job={"steps": 20})
    done = cluster.run([*BOTH, *RUN, "--restarts", "2"], slowly.directory, timeout=120)
    assert done.code == 0 and "restart 2 of 2" in done.err, done
    assert "a rank on node2 ended without an error message" in done.err, done
    assert "ranks on node2 failed first in 2 starts" in done.err, done
    assert "resuming     from step 7" in done.out and "resuming     from step 14" in done.out, done
    assert slowly.losses()[:4] == pytest.approx(losses_alone, rel=2e-6) and len(slowly.losses()) == 20


@pytest.mark.thorough
def test_a_node_out_of_reach_ends_with_a_sentence(cluster: Cluster, job: JobFile, hosts: Path) -> None:
    hosts.write_text("node1:1\nnode3:1\n")
    begin = time.monotonic()
    done = cluster.run([*BOTH, *RUN], job.directory)
    assert done.code == 3 and "rank started on node1, node3; expected" in done.err, done
    assert "Traceback" not in done.err and time.monotonic() - begin < 60, done
