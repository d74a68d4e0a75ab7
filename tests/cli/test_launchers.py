"""Ranks of launchers that are not installed here: other launchers start them, with the variables that Flux and PALS set."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import JobFile
from launching import Finished, hpctrain, run

MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
NO_MPI = {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}
AS_FLUX = (
    'export FLUX_TASK_RANK=$PMI_RANK FLUX_JOB_SIZE=$PMI_SIZE FLUX_TASK_LOCAL_ID=$PMI_RANK FLUX_JOB_NNODES=1; exec "$@"'
)
"""MPICH's mpiexec serves the PMI-1 that Flux serves, over a descriptor, too."""
FLUX_TASK = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "2"}
AS_PALS = 'export PALS_RANKID=$PMI_RANK PALS_LOCAL_RANKID=$PMI_RANK PALS_NODEID=0; unset {unset}; exec "$@"'


def started_as(script: str, ranks: int, *words: str) -> list[str]:
    return [MPIEXEC, "-n", str(ranks), "sh", "-c", script, "sh", *hpctrain(*words)]


@pytest.fixture
def losses_alone(job: JobFile) -> list[float]:
    done = run(hpctrain("run", "job.toml", "--set", "job.output_dir=alone"), job.directory)
    assert done.code == 0, done
    return job.losses("alone")


@pytest.mark.thorough
def test_tasks_of_flux_are_one_world_over_mpi(job: JobFile, losses_alone: list[float]) -> None:
    done = run(started_as(AS_FLUX, 2, "run", "job.toml"), job.directory)
    assert done.code == 0 and done.err == "" and "2 (mpi), started by Flux" in done.out, done
    assert job.losses() == pytest.approx(losses_alone, rel=2e-6)


@pytest.mark.thorough
def test_one_task_of_flux_needs_no_mpi(job: JobFile) -> None:
    done = run(started_as(AS_FLUX, 1, "run", "job.toml"), job.directory, env=NO_MPI)
    assert done.code == 0 and "1 (alone)" in done.out, done


@pytest.mark.nightly
def test_torchrun_under_mpiexec_is_the_launcher(job: JobFile, losses_alone: list[float]) -> None:
    torchrun = str(Path(sys.executable).parent / "torchrun")
    words = [MPIEXEC, "-n", "1", torchrun, "--standalone", "--nproc-per-node=2", "-m", "hpctrain", "run", "job.toml"]
    done = run(words, job.directory)
    assert done.code == 0 and "2 (torchrun), 2 per node" in done.out, done
    assert job.losses() == pytest.approx(losses_alone, rel=2e-6)


@pytest.mark.thorough
def test_tasks_of_flux_without_mpi_are_refused(job: JobFile) -> None:
    for words, env in (started_as(AS_FLUX, 2, "run", "job.toml"), {}), (hpctrain("run", "job.toml"), FLUX_TASK):
        done = run(words, job.directory, env={**env, **NO_MPI})
        refused(done, job, "Flux started several ranks, but", "one torchrun on each node")


@pytest.mark.cases(nightly=["another PMI"], rest="thorough")
@pytest.mark.parametrize("unset", ["MPI_LOCALNRANKS", "MPI_LOCALNRANKS PMI_FD"], ids=["MPI", "another PMI"])
def test_ranks_of_pals_use_mpi_or_are_refused(job: JobFile, unset: str) -> None:
    """Without PMI_FD, as under PALS with the MPICH of a wheel, each MPI process is alone."""
    done = run(started_as(AS_PALS.format(unset=unset), 2, "run", "job.toml"), job.directory)
    if "PMI_FD" in unset:
        refused(done, job, "PALS started several ranks, but mpi4py's MPI library sees only one", "MPICC=...")
    else:
        assert done.code == 0 and done.err == "" and "2 (mpi), started by PALS" in done.out, done


def refused(done: Finished, job: JobFile, *sentences: str) -> None:
    """Exit 3 with a sentence, before there is an output directory."""
    assert done.code == 3 and "Traceback" not in done.err and not job.output.exists(), done
    for sentence in sentences:
        assert sentence in done.err, done


@pytest.mark.nightly
def test_doctor_names_the_launcher(job: JobFile) -> None:
    done = run(started_as(AS_FLUX, 2, "doctor"), job.directory)
    assert done.code == 0 and "2 ranks on 1 node over MPI, started by Flux, connected through PMI" in done.out, done
