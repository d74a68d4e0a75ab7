"""`hpctrain run` on cores: each rank has its own, unless its launcher or the job says otherwise."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from jobs import JobFile
from launching import Finished, hpctrain, run

HERE = sorted(os.sched_getaffinity(0))
MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
pytestmark = pytest.mark.skipif(len(HERE) < 2, reason="needs two CPUs")

REPORT = """
import json, os, threading
import torch, torch.distributed as dist
from hpctrain.api import hookimpl


@hookimpl
def hpctrain_step_end(step):
    masks = {tuple(sorted(os.sched_getaffinity(int(thread)))) for thread in os.listdir("/proc/self/task")}
    inherited = []
    new = threading.Thread(target=lambda: inherited.append(sorted(os.sched_getaffinity(0))))
    new.start()
    new.join()
    told = {"masks": sorted(masks), "inherited": inherited[0], "threads": torch.get_num_threads()}
    with open(f"cores-{dist.get_rank()}.json", "w") as file:
        json.dump(told, file)
"""


@pytest.fixture
def reporting(job: JobFile) -> JobFile:
    """Each rank writes the CPUs of all its threads, and of a new one."""
    (job.directory / "report.py").write_text(REPORT)
    return job.set(job={"steps": 1}, plugins={"load": ["report"]})


def ran(job: JobFile, words: list[str], ranks: int = 2, **env: str) -> tuple[Finished, list[dict[str, object]]]:
    environment = {"PYTHONPATH": f"{job.directory}:{os.environ.get('PYTHONPATH', '')}", **env}
    done = run(["env", "-u", "OMP_NUM_THREADS", *words], job.directory, env=environment)
    assert done.code == 0, done
    return done, [json.loads((job.directory / f"cores-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mpi",
    [{}, pytest.param({"MPI4PY_LIBMPI": "/nonexistent/libmpi.so"}, marks=pytest.mark.nightly)],
    ids=["MPI", "gloo"],
)
def test_each_rank_has_cores_of_its_own(reporting: JobFile, mpi: dict[str, str]) -> None:
    done, (first, second) = ran(reporting, hpctrain("run", "job.toml", "-n", "2"), **mpi)
    for rank in (first, second):
        assert len(rank["masks"]) == 1 and rank["masks"][0] == rank["inherited"], "every thread, and those to come"
    one, other = set(first["inherited"]), set(second["inherited"])
    assert not one & other and one | other == set(HERE)
    assert first["threads"] >= 1 and first["threads"] + second["threads"] <= len(HERE)
    assert "cores        CPU" in done.out and "bound by hpctrain" in done.out, done
    for log in (reporting.output / "log").iterdir():
        assert "bound by hpctrain; threads: " in log.read_text()


@pytest.mark.thorough
def test_ranks_that_mpiexec_has_bound_keep_their_cores(reporting: JobFile) -> None:
    """The other way round than hpctrain would."""
    bound = f"user:{HERE[1]},{HERE[0]}"
    done, (first, second) = ran(reporting, [MPIEXEC, "-n", "2", "-bind-to", bound, *hpctrain("run", "job.toml")])
    assert (first["inherited"], second["inherited"]) == ([HERE[1]], [HERE[0]])
    assert "bound by the launcher" in done.out and first["threads"] == second["threads"] == 1, done


@pytest.mark.thorough
def test_a_job_may_leave_its_ranks_unbound(reporting: JobFile) -> None:
    done, (first, second) = ran(reporting, hpctrain("run", "job.toml", "-n", "2", "--set", "job.cpu_bind=none"))
    assert first["inherited"] == second["inherited"] == HERE
    assert "shared by 2 ranks, not bound" in done.out, done
    assert first["threads"] == second["threads"] == max(1, len(HERE) // 2)


@pytest.mark.nightly
def test_open_mpi_s_own_binding_may_be_asked_for_in_the_job(reporting: JobFile, openmpi_python: str) -> None:
    """Else hpctrain switches it off, and binds the ranks itself. Its mpiexec reads [environment] before there is a rank."""
    words = hpctrain("run", "job.toml", "-n", "2", python=openmpi_python)
    done, (first, second) = ran(reporting, words)
    assert "bound by hpctrain" in done.out and not set(first["inherited"]) & set(second["inherited"]), done
    reporting.set(job={"output_dir": "again"})
    policies = {"PRTE_MCA_rmaps_default_mapping_policy": "core", "PRTE_MCA_hwloc_default_binding_policy": "core"}
    reporting.set(environment=policies)
    done, (first, second) = ran(reporting, words)
    assert "bound by the launcher" in done.out and not set(first["inherited"]) & set(second["inherited"]), done


PROGRAM = """
import os
import hpctrain
from jobs import TINY

before = os.sched_getaffinity(0)
for name in ("a", "b"):
    hpctrain.run({**TINY, "job": {"name": name, "steps": 1}})
    assert os.sched_getaffinity(0) == before
"""


@pytest.mark.thorough
def test_a_program_has_its_cores_back_after_a_job(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    tests = str(Path(__file__).parent.parent)
    done = run([MPIEXEC, "-n", "2", sys.executable, "program.py"], tmp_path, env={"PYTHONPATH": tests})
    assert done.code == 0 and done.out.count("bound by hpctrain") == 2, done


@pytest.mark.thorough
def test_doctor_binds_as_a_job_does(tmp_path: Path) -> None:
    done = run(hpctrain("doctor", "-n", "2", "--json"), tmp_path)
    (row,) = [row for row in map(json.loads, done.out.splitlines()) if row["check"] == "cores"]
    assert row["state"] == "ok" and row["found"].endswith("2 threads of 2 ranks, bound by hpctrain"), done
