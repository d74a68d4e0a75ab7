"""`hpctrain run --hostfile` with hosts that an agent in ssh's place plays on this machine: hosts out of reach, signals, errors.

tests/slurm has real nodes.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from jobs import JobFile
from launching import KILL, Started, hpctrain, run, started, wait_until

PROGRAMS = Path(__file__).parent / "programs"
RUN = hpctrain("run", "job.toml", "--hostfile", "hosts")
IMPATIENT = """
from hpctrain_tools.launch import on_hosts

on_hosts.APPEAR_SECONDS = 3.0
from hpctrain.cli import main

main()
"""
"""The command with a shorter limit than the two minutes of a real start."""
NOTING = """
from hpctrain.api import hookimpl

open("imports", "a").write("once\\n")

@hookimpl
def hpctrain_job_start():
    pass
"""


def environment(python_path: Path = PROGRAMS) -> dict[str, str]:
    agent = str(PROGRAMS / "agent.sh")
    # hosts read no memory of each other: UCX would, and abort when a rank is gone
    settings = {
        "UCX_TLS": "tcp,self",
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_LAUNCHER_EXEC": agent,
        "PRTE_MCA_plm_ssh_agent": agent,
    }
    return {**settings, "PYTHONPATH": f"{python_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """The ranks 0 and 1 on host a, rank 2 on b."""
    file = tmp_path / "hosts"
    file.write_text("a slots=2\n\n# another\nb:1\n")
    return file


@pytest.fixture
def slowly(job: JobFile) -> JobFile:
    return job.sleeps(0.1).set(job={"steps": 1000}, plugins={"load": ["slow"]})


@pytest.mark.thorough
def test_hosts_train_as_one_process_does(job: JobFile, hosts: Path, tmp_path: Path) -> None:
    (tmp_path / "noting.py").write_text(NOTING)
    alone = run(hpctrain("run", "job.toml", "--set", "job.output_dir=alone"), tmp_path)
    assert alone.code == 0, alone
    done = run([*RUN, "--set", "plugins.load=['noting']"], tmp_path, env=environment(tmp_path))
    assert done.code == 0 and "starting     3 ranks on a, b" in done.out and "3 (mpi)" in done.out, done
    assert done.err == "" and "\x1e" not in done.out, done
    assert job.losses() == pytest.approx(job.losses("alone"), rel=2e-6)
    assert len((tmp_path / "imports").read_text().splitlines()) == 3, "one in each rank"


@pytest.mark.nightly
def test_open_mpi_knows_the_hosts_too(openmpi_python: str, slowly: JobFile, hosts: Path, tmp_path: Path) -> None:
    words = [openmpi_python, *hpctrain("run", "job.toml")[1:], "--hostfile", "hosts"]
    done = run([*words, "--set", "job.steps=3"], tmp_path, env=environment(tmp_path))
    assert done.code == 0 and "3 ranks on a, b" in done.out and "3 (mpi)" in done.out, done


@pytest.mark.thorough
def test_a_signal_saves(slowly: JobFile, hosts: Path, tmp_path: Path) -> None:
    with started(RUN, tmp_path, environment(tmp_path)) as command:
        slowly.wait_for_steps(2)
        command.process.send_signal(signal.SIGTERM)
        stopped = command.finish(30)
    assert stopped.code == 75 and "stopped at step" in stopped.out, stopped
    assert "continue with: hpctrain run job.toml --hostfile hosts" in stopped.out, stopped


@pytest.mark.nightly
def test_the_second_signal_ends_all_ranks_at_once(slowly: JobFile, hosts: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(slow.read_text().replace("time.sleep(0.1)", "open('in-a-step', 'w')\n    time.sleep(60)"))
    with started(RUN, tmp_path, environment(tmp_path)) as command:
        wait_until(lambda: (tmp_path / "in-a-step").exists(), 60, "training")
        for _ in range(2):
            command.process.send_signal(signal.SIGINT)
            time.sleep(1.5)
        ended = command.finish(8)
    assert ended.code == 130, ended


@pytest.mark.thorough
def test_no_rank_outlives_its_starter(slowly: JobFile, hosts: Path, tmp_path: Path) -> None:
    with started(RUN, tmp_path, environment(tmp_path)) as command:
        slowly.wait_for_steps(2)
        command.process.send_signal(KILL)
        command.finish(30)  # fails if a process is left


def rank_of(command: Started, number: int) -> int:
    return next(p.pid for p in command.ranks() if p.environ().get("PMI_RANK") == str(number))


@pytest.mark.nightly
@pytest.mark.parametrize(("rank", "host"), [(0, "a"), (1, "a"), (2, "b")])
def test_a_killed_rank_is_told_with_its_host(
    rank: int, host: str, slowly: JobFile, hosts: Path, tmp_path: Path
) -> None:
    with started(RUN, tmp_path, environment(tmp_path)) as command:
        slowly.wait_for_steps(2)
        os.kill(rank_of(command, rank), KILL)
        ended = command.finish(30)
    assert ended.code == 4 and f"a rank on {host} ended without an error message" in ended.err, ended


@pytest.mark.nightly
def test_errors_keep_their_exit_code(job: JobFile, hosts: Path, tmp_path: Path) -> None:
    """MPICH's mpiexec alone would give the codes of all ranks, in one number."""
    wrong = run([*RUN, "--set", "optimizer.lr=-1"], tmp_path, env=environment())
    assert wrong.code == 2 and wrong.err.count("found -1") == 1, wrong
    (tmp_path / "faulty.py").write_text(
        "import os\nfrom hpctrain.api import hookimpl\n"
        "@hookimpl\ndef hpctrain_step_end(step): 1 / (int(os.environ['RANK']) - 1)\n"
    )
    failed = run([*RUN, "--set", "plugins.load=['faulty']"], tmp_path, env=environment(tmp_path))
    assert failed.code == 4 and failed.err.count("ZeroDivisionError") == 1, failed


@pytest.mark.nightly
def test_hosts_out_of_reach(job: JobFile, hosts: Path, tmp_path: Path) -> None:
    hosts.write_text("a:1\nunknown:1\n")
    unknown = run(RUN, tmp_path, 30, environment())
    assert unknown.code == 3 and "no rank started on unknown; expected `ssh unknown true`" in unknown.err, unknown
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    hosts.write_text("a:1\noff:1\n")
    words = [RUN[0], "impatient.py", *RUN[3:]]
    off = run(words, tmp_path, 30, environment())
    assert off.code == 3 and "not every rank started on off; expected" in off.err, off


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("a:2\n", ["-n", "3"], "--hostfile hosts: found 2 slots for 3 ranks; expected at most as many ranks as slots"),
        ("# none\n", [], "--hostfile hosts: found no host, expected a line `HOST slots=SLOTS`"),
        ("a\nb slots=x\n", [], "--hostfile hosts:2: found 'b slots=x', expected HOST slots=SLOTS or HOST:SLOTS"),
        ("b:0\n", [], "--hostfile hosts:1: found 'b:0', expected"),
    ],
)
def test_mistakes(text: str, words: list[str], said: str, job: JobFile, hosts: Path, tmp_path: Path) -> None:
    hosts.write_text(text)
    done = run([*RUN, *words], tmp_path, env=environment())
    assert done.code == 2 and said in done.err and "Traceback" not in done.err, done


@pytest.mark.nightly
def test_no_file_and_no_mpi(job: JobFile, hosts: Path, tmp_path: Path) -> None:
    missing = run(hpctrain("run", "job.toml", "--hostfile", "none"), tmp_path)
    assert missing.code == 2 and "--hostfile none: cannot be read: No such file" in missing.err, missing
    without = run(RUN, tmp_path, env={**environment(), "MPI4PY_LIBMPI": "/none/libmpi.so"})
    assert without.code == 3 and "--hostfile: found no MPI library, expected one" in without.err, without


@pytest.mark.nightly
def test_hosts_that_are_this_machine_need_no_mpiexec(job: JobFile, hosts: Path, tmp_path: Path) -> None:
    hosts.write_text("localhost slots=1\n127.0.0.1\n")
    done = run(RUN, tmp_path, env={"HYDRA_LAUNCHER_EXEC": "/none"})
    assert done.code == 0 and "starting     2 ranks\n" in done.out, done
