"""[elastic]: a job goes on with fewer ranks when slots are missing, and with more when they are back. Nothing is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from jobs import JobFile
from launching import KILL, Started, hpctrain, in_process, run, started, wait_until

pytestmark = pytest.mark.timeout(240)

PROGRAMS = Path(__file__).parent / "programs"
RUN = hpctrain("run", "job.toml", "-n", "4", "--hostfile", "hosts", "--restarts", "3")
SLOW = """
import time

from hpctrain.api import hookimpl


@hookimpl
def hpctrain_step_end(step):
    time.sleep(0.1)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    file = tmp_path / "hosts"
    file.write_text("localhost slots=4\n")
    return file


@pytest.fixture
def elastic(job: JobFile) -> JobFile:
    (job.directory / "slow.py").write_text(SLOW)
    return job.set(
        job={"steps": 90},
        # after 90 steps in float32, 4 undisturbed ranks differ from one by more than 2e-6
        precision={"mode": "fp64"},
        checkpoint={"every_steps": 2, "keep": 2},
        plugins={"load": ["slow"]},
        elastic={"min_ranks": 2},
    )


def environment(job: JobFile, kills: str = "") -> dict[str, str]:
    agent = str(PROGRAMS / "agent.sh")
    path = os.pathsep.join([str(job.directory), str(PROGRAMS), os.environ.get("PYTHONPATH", "")])
    return {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": agent, "KILLS": kills, "PYTHONPATH": path}


def whole_losses(job: JobFile) -> list[float]:
    """The losses of an undisturbed run of one process."""
    words = ["--set", "job.output_dir=whole", "--set", "plugins.load=", "--set", "elastic.min_ranks=1"]
    done = run(hpctrain("run", "job.toml", *words), job.directory)
    assert done.code == 0, done
    return job.losses("whole")


def steps(job: JobFile) -> int:
    rows = job.output / "metrics.jsonl"
    return rows.read_text().count("\n") if rows.exists() else 0


def sizes(job: JobFile) -> list[int]:
    """The ranks of each start, as rank 0's log has them."""
    resolved = (job.output / "job.resolved.toml").read_text().splitlines()[0]
    return [int(word) for word in resolved.split() if word.isdigit()]


def wait_for(command: Started, job: JobFile, ranks: int) -> None:
    """Wait until so many ranks train."""

    def so() -> bool:
        return (job.output / "job.resolved.toml").exists() and sizes(job) == [ranks] and len(command.ranks()) == ranks

    wait_until(so, 60, f"{ranks} ranks")
    now = steps(job)
    wait_until(lambda: steps(job) > now + 2, 60, f"steps of {ranks} ranks")


@pytest.mark.nightly
def test_four_ranks_three_and_four_again(elastic: JobFile, hosts: Path, tmp_path: Path) -> None:
    with started(RUN, tmp_path, environment(elastic)) as command:
        wait_for(command, elastic, 4)
        hosts.write_text("localhost slots=3\n")
        os.kill(command.ranks()[1].pid, KILL)
        wait_for(command, elastic, 3)
        hosts.write_text("localhost slots=4\n")
        wait_for(command, elastic, 4)
        done = command.finish(90)
    assert done.code == 0 and done.out.count("starting     ") == 3, done
    assert "restart 1 of 3" in done.err and "restart 2" not in done.err, done
    assert "3 of 4 ranks start: hosts has 3 slots\n" in done.err, done
    assert "hosts has slots for 4 ranks: those that run save, and 4 start" in done.err, done
    assert len(elastic.losses()) == 90
    assert elastic.losses() == pytest.approx(whole_losses(elastic), rel=1e-9)


@pytest.mark.nightly
def test_the_largest_number_that_fits_is_taken(elastic: JobFile, hosts: Path, tmp_path: Path) -> None:
    """8 samples don't divide over 3 ranks, and the tensor axis keeps its size."""
    hosts.write_text("localhost slots=3\n")
    elastic.set(job={"steps": 3}, batch={"global_size": 8}, parallelism={"tensor": 2})
    done = run(RUN, tmp_path, env=environment(elastic))
    assert done.code == 0 and "starting     2 ranks" in done.out and "tp 2" in done.out, done
    assert "2 of 4 ranks start: hosts has 3 slots; 3 ranks do not fit: [parallelism]" in done.err, done


@pytest.mark.thorough
def test_too_few_slots(elastic: JobFile, hosts: Path, tmp_path: Path) -> None:
    hosts.write_text("localhost slots=1\n")
    done = run(RUN, tmp_path, env=environment(elastic))
    assert done.code == 2, done
    assert "found 1 slot for 4 ranks; expected at least 2 slots, [elastic] min_ranks" in done.err, done
    hosts.write_text("localhost slots=3\n")
    none = run(
        [*RUN, "--set", "batch.global_size=4", "--set", "elastic.min_ranks=3"], tmp_path, env=environment(elastic)
    )
    assert (
        none.code == 2 and "[elastic] min_ranks = 3 up no number of ranks fits the job; 3 ranks do not" in none.err
    ), none


@pytest.mark.nightly
def test_below_min_ranks_the_job_ends_and_the_same_command_continues(
    elastic: JobFile, hosts: Path, tmp_path: Path
) -> None:
    elastic.set(job={"steps": 40})
    with started(RUN, tmp_path, environment(elastic)) as command:
        wait_for(command, elastic, 4)
        hosts.write_text("localhost slots=1\n")
        os.kill(command.ranks()[2].pid, KILL)
        done = command.finish(60)
    assert done.code == 4 and "found 1 slot for 4 ranks; expected at least 2 slots" in done.err, done
    assert "the same command continues once there are enough" in done.err and "Traceback" not in done.err, done
    hosts.write_text("localhost slots=2\n")
    again = run(RUN, tmp_path, env=environment(elastic))
    assert again.code == 0 and "resuming" in again.out and len(elastic.losses()) == 40, again


@pytest.mark.nightly
def test_a_signal_while_more_ranks_are_awaited_ends_with_75(elastic: JobFile, hosts: Path, tmp_path: Path) -> None:
    hosts.write_text("localhost slots=2\n")
    with started(RUN, tmp_path, environment(elastic)) as command:
        wait_for(command, elastic, 2)
        command.process.terminate()
        done = command.finish(60)
    assert done.code == 75 and done.out.count("starting     ") == 1, done


@pytest.mark.nightly
def test_a_host_that_failed_twice_is_left_out(elastic: JobFile, hosts: Path, tmp_path: Path) -> None:
    """Both rounds of two hosts: rank 1, on b, is killed at two steps. Then rank 1 is on a."""
    hosts.write_text("a:2\nb:2\n")
    elastic.set(job={"steps": 12}, plugins={"load": ["killer"]})
    words = [*RUN, "--set", "elastic.min_ranks=1"]
    done = run(words, tmp_path, 150, environment(elastic, "3:4 2:7"))
    assert done.code == 0 and done.out.count("starting     4 ranks on a, b") == 2, done
    assert "ranks on b failed first in 2 starts" in done.err, done
    assert "b is left out until its line in hosts changes" in done.err, done
    assert "2 of 4 ranks start: hosts has 2 slots without b" in done.err, done
    assert "starting     2 ranks on a\n" in done.out, done
    assert elastic.losses() == pytest.approx(whole_losses(elastic), rel=1e-9)


@pytest.mark.nightly
def test_a_host_that_is_gone_is_left_out(elastic: JobFile, hosts: Path, tmp_path: Path) -> None:
    """Its ranks are killed, and nothing starts on it again."""
    hosts.write_text("b:1\na:1\n")
    (tmp_path / "leaving.py").write_text(
        "import os, signal\nfrom pathlib import Path\nfrom hpctrain.api import hookimpl\n"
        "@hookimpl\ndef hpctrain_step_end(step):\n"
        "    if step == 5 and os.environ['RANK'] == '0' and os.environ['WORLD_SIZE'] == '2':\n"
        "        Path('down-b').touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    elastic.set(job={"steps": 9}, plugins={"load": ["leaving"]}, elastic={"min_ranks": 1})
    words = hpctrain("run", "job.toml", "-n", "2", "--hostfile", "hosts", "--restarts", "2")
    done = run(words, tmp_path, 120, environment(elastic))
    assert done.code == 0 and "no rank started on b" in done.err, done
    assert "b is left out" in done.err and "starting     1 rank on a" in done.out, done
    assert elastic.losses() == pytest.approx(whole_losses(elastic), rel=1e-9)


@pytest.mark.nightly
def test_check_tells_what_min_ranks_allows(elastic: JobFile, tmp_path: Path) -> None:
    many = in_process("check", "job.toml", "-n", "1", cwd=tmp_path, env=environment(elastic))
    assert many.code == 2 and "[elastic] min_ranks: found 2, but the job starts on 1; expected" in many.err, many
    assert "found 0" in in_process("check", "job.toml", "--set", "elastic.min_ranks=0", cwd=tmp_path).err
