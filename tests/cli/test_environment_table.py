"""[environment] as ranks have it: before the libraries start, the shell's first, and told where ranks differ."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import tomli
from jobs import JobFile
from launching import Finished, hpctrain, in_process, run

MPIEXEC = str(Path(sys.executable).parent / "mpiexec")
SHOWN = {"OMP_DISPLAY_ENV": "TRUE", "OMP_THREAD_LIMIT": 77}
"""libgomp then prints its variables to stderr when it starts."""


def limits(done: Finished) -> list[str]:
    """The thread limit that each process's libgomp has read: ranks of -n have that of their starter."""
    return re.findall(r"OMP_THREAD_LIMIT = '(\d+)'", done.err)


@pytest.mark.cases(thorough=["alone"], rest="nightly")
@pytest.mark.parametrize("started", [["-n", "1"], ["-n", "2"], ["mpiexec"]], ids=["alone", "starter", "mpiexec"])
def test_openmp_reads_them_and_the_run_records_them(job: JobFile, started: list[str]) -> None:
    job.set(environment=SHOWN)
    before = [MPIEXEC, "-n", "2"] if started == ["mpiexec"] else []
    words = hpctrain("run", "job.toml", *(started if not before else []))
    done = run([*before, *words], job.directory)  # an import must not come first
    ranks = 1 if started == ["-n", "1"] else 2
    assert done.code == 0 and limits(done) == ["77"] * (2 if before else 1), done
    assert "environment  OMP_DISPLAY_ENV=TRUE; OMP_THREAD_LIMIT=77\n" in done.out, done
    resolved = tomli.loads((job.output / "job.resolved.toml").read_text())["environment"]
    assert resolved == {"OMP_DISPLAY_ENV": "TRUE", "OMP_THREAD_LIMIT": "77"}
    logs = [path.read_text() for path in sorted((job.output / "log").iterdir())]
    assert len(logs) == ranks and all("environment: OMP_DISPLAY_ENV=TRUE; OMP_THREAD_LIMIT=77\n" in log for log in logs)


@pytest.mark.thorough
def test_mpi_reads_them(job: JobFile) -> None:
    done = run(hpctrain("run", "job.toml", "-n", "2", "--set", "environment.MPIR_CVAR_DEBUG_SUMMARY=1"), job.directory)
    assert done.code == 0 and "data structure summary" in done.out, done


@pytest.mark.nightly
def test_the_shell_s_wins_and_the_screen_says_so(job: JobFile) -> None:
    job.set(environment=SHOWN)
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory, env={"OMP_THREAD_LIMIT": "55"})
    assert done.code == 0 and limits(done) == ["55"], done
    assert "OMP_THREAD_LIMIT=55 of the shell instead of 77" in done.out, done


@pytest.mark.nightly
def test_a_check_sets_nothing_and_refuses_code(job: JobFile) -> None:
    job.set(environment={"LD_PRELOAD": "/x.so", **SHOWN})
    for words in (["check", "job.toml"], ["run", "job.toml"], ["run", "job.toml", "-n", "2"]):
        done = run(hpctrain(*words), job.directory)
        assert done.code == 2 and "[environment] LD_PRELOAD: expected the name of a variable" in done.err, done
        assert words[0] == "run" or limits(done) == [], done


@pytest.mark.nightly
def test_a_job_file_may_be_a_pipe(job: JobFile) -> None:
    done = run(["bash", "-c", '"$0" -m hpctrain run <(cat job.toml)', sys.executable], job.directory)
    assert done.code == 0, done


@pytest.mark.thorough
def test_doctor_shows_them_and_those_that_differ(tmp_path: Path) -> None:
    words = hpctrain("doctor")
    alike = {"UCX_TLS": "self,tcp", "NCCL_API_TOKEN": "s3cret"}
    done = run([MPIEXEC, "-n", "1", *words, ":", "-n", "1", "env", "FI_PROVIDER=tcp", *words], tmp_path, env=alike)
    assert done.code == 0 and "s3cret" not in done.out + done.err, done
    assert re.search(r"ok                       rank 0 on \S+: .*UCX_TLS=self,tcp", done.out), done
    warned = r"warn  environment        rank 1 on \S+: FI_PROVIDER: found tcp; rank 0 on \S+ has nothing"
    assert re.search(warned, done.out), done


def test_the_script_for_pbs_exports_what_mpiexec_reads(job: JobFile) -> None:
    """Quoted, and only if the shell has set nothing else."""
    job.set(environment={"PRTE_MCA_plm_base_verbose": "a 'b' $HOME", "UCX_TLS": "tcp"})
    done = in_process("submit", "job.toml", "--to", "pbs", "--dry-run", cwd=job.directory)
    assert done.code == 0 and "UCX_TLS" not in done.out, done
    (line,) = [line for line in done.out.splitlines() if "PRTE_MCA" in line]
    for given, expected in (({}, "a 'b' $HOME"), ({"PRTE_MCA_plm_base_verbose": "mine"}, "mine")):
        shell = run(["bash", "-c", f"{line}\nprintenv PRTE_MCA_plm_base_verbose"], job.directory, env=given)
        assert shell.out == f"{expected}\n", shell
