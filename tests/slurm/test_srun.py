"""`srun hpctrain run`: one world over two nodes, with MPI and without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import JobFile
from launching import hpctrain

from slurm.cluster import Cluster

pytestmark = pytest.mark.timeout(120)

FOUR = ["srun", "-K", "-N2", "-n4", "--ntasks-per-node=2"]
TWO = ["srun", "-K", "-N2", "-n2"]
NOTICE = "without an MPI that fits"


def logs(job: JobFile) -> list[str]:
    """Each rank's log, in rank order."""
    return [path.read_text() for path in sorted((job.output / "log").iterdir())]


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize(
    ("mpi", "source"),
    [
        (["--mpi=pmi2"], "mpi"),
        pytest.param([], "slurm", marks=pytest.mark.nightly),
        pytest.param(["--mpi=pmix"], "slurm", marks=pytest.mark.nightly, id="MPICH speaks no PMIx"),
    ],
)
def test_four_tasks_are_one_world_on_two_nodes(
    cluster: Cluster, job: JobFile, losses_alone: list[float], mpi: list[str], source: str
) -> None:
    done = cluster.run([*FOUR, *mpi, *hpctrain("run", "job.toml")], job.directory)
    assert done.code == 0, done
    assert f"4 ({source})" in done.out and done.out.count("step 4/4") == 1, done
    for rank, log in enumerate(logs(job)):
        assert f"rank {rank} of 4 on node{1 + rank // 2} ({source})" in log, log
    assert job.losses() == pytest.approx(losses_alone, rel=2e-6)
    if source == "mpi":
        assert done.err == "", done
    else:
        assert done.err.count(NOTICE) == 1 and done.err.count("--mpi=pmi2") == 1, done


@pytest.mark.nightly
def test_ranks_dealt_out_to_the_nodes_in_turn_are_told(
    cluster: Cluster, job: JobFile, losses_alone: list[float]
) -> None:
    words = [*FOUR, "--distribution=cyclic", "--mpi=pmi2", *hpctrain("run", "job.toml")]
    done = cluster.run(words, job.directory)
    assert done.code == 0, done
    assert "rank 0 is on node1, rank 1 on node2, and so on in turn" in done.err, done
    assert job.losses() == pytest.approx(losses_alone, rel=2e-6)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_open_mpi_over_pmix(cluster: Cluster, job: JobFile, losses_alone: list[float], openmpi_python: str) -> None:
    done = cluster.run([*FOUR, "--mpi=pmix", *hpctrain("run", "job.toml", python=openmpi_python)], job.directory)
    assert done.code == 0, done
    assert "4 (mpi)" in done.out and done.out.count("step 4/4") == 1, done
    for rank, log in enumerate(logs(job)):
        assert f"rank {rank} of 4 on node{1 + rank // 2} (mpi)" in log, log
    assert job.losses() == pytest.approx(losses_alone, rel=2e-6)


@pytest.mark.thorough
def test_without_mpi_library_too(cluster: Cluster, job: JobFile, losses_alone: list[float]) -> None:
    hidden = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
    done = cluster.run([*TWO, "--mpi=pmi2", *hpctrain("run", "job.toml")], job.directory, env=hidden)
    assert done.code == 0 and "2 (slurm)" in done.out and done.err.count(NOTICE) == 1, done
    assert job.losses() == pytest.approx(losses_alone, rel=2e-6)


@pytest.mark.cases(nightly=["mpi1"], rest="thorough")
@pytest.mark.parametrize("mpi", [["--mpi=pmi2"], []])
def test_n_must_be_the_world(cluster: Cluster, job: JobFile, mpi: list[str]) -> None:
    wrong = cluster.run([*TWO, *mpi, *hpctrain("run", "job.toml", "-n", "3")], job.directory)
    assert wrong.code == 2 and wrong.err.count("-n 3: the launcher started 2 ranks") == 1, wrong
    assert not job.output.exists()


@pytest.mark.nightly
def test_mpiexec_in_an_allocation(cluster: Cluster, job: JobFile, losses_alone: list[float]) -> None:
    """MPICH's mpiexec starts its proxies with srun: their SLURM variables say 2 tasks, but there are 4 ranks."""
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    words = ["salloc", "-N2", "-n4", "--ntasks-per-node=2", mpiexec, "-n", "4", "-ppn", "2"]
    done = cluster.run([*words, *hpctrain("run", "job.toml")], job.directory)
    assert done.code == 0 and "4 (mpi)" in done.out and NOTICE not in done.err, done
    assert [f"node{1 + rank // 2}" in log for rank, log in enumerate(logs(job))] == [True] * 4
    assert job.losses() == pytest.approx(losses_alone, rel=2e-6)
