"""A signal at any moment, to the starter or to one rank: one checkpoint, exit 75, then the same losses with the same command.
A closed terminal ends nothing. What users' code forks answers signals as Python does."""

from __future__ import annotations

import os
import pty
import select
import uuid
from collections.abc import Sequence
from pathlib import Path

import pytest
from jobs import JobFile
from launching import MARK, SOON, TERMINATE, Finished, hpctrain, run, started, wait_until

pytestmark = pytest.mark.timeout(200)

SLOWLY = """
import os, time
from pathlib import Path
from hpctrain.api import hookimpl

PHASE = os.environ.get("SLOW_PHASE")

@hookimpl
def hpctrain_phase_begin(phase, step):
    if phase == PHASE and (step >= 2 or phase == "build"):
        Path(f"in_phase.{os.environ['RANK']}").touch()
        time.sleep(1.5)
"""
STEPS = 8


@pytest.fixture
def job(tmp_path: Path) -> JobFile:
    (tmp_path / "slowly.py").write_text(SLOWLY)
    return JobFile(tmp_path).set(
        job={"steps": STEPS}, checkpoint={"every_steps": 3}, plugins={"load": ["slowly"]},
        evaluation={"every_steps": 3, "batches": 2},
    )  # fmt: skip


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an undisturbed run."""
    job = JobFile(tmp_path_factory.mktemp("straight")).set(job={"steps": STEPS})
    done = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert done.code == 0, done
    return job.losses()


def stopped_in(job: JobFile, phase: str, number: int, only: int | None) -> Finished:
    """The command, signalled while all ranks are in a phase. only: the rank that gets the signal; None: the starter."""
    words = hpctrain("run", "job.toml", "-n", "2")
    with started(words, job.directory, {"SLOW_PHASE": phase}) as command:
        wait_until(lambda: len(list(job.directory.glob("in_phase.*"))) == 2, 90, f"both ranks in {phase}")
        if only is None:
            command.process.send_signal(number)
        else:
            sorted(command.ranks(), key=lambda one: one.pid)[only].send_signal(number)  # forked one after the other
        return command.finish(60)


@pytest.mark.parametrize(
    ("phase", "number", "only"),
    [
        ("evaluation", SOON, 1),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("build", SOON, 1), ("build", TERMINATE, None), ("forward", SOON, 1), ("evaluation", SOON, None),
                ("save", SOON, 1), ("save", TERMINATE, None),
            )
        ),
    ],
)  # fmt: skip
def test_the_job_saves_once_and_goes_on(
    job: JobFile, straight: list[float], phase: str, number: int, only: int | None
) -> None:
    done = stopped_in(job, phase, number, only)
    assert done.code == 75, done
    assert done.out.count("stopped at step") == 1, done
    saved = sorted(path.name for path in (job.output / "checkpoints").glob("step-*"))
    step = len(job.losses())
    assert step < STEPS and not [name for name in saved if name.endswith(".tmp")], saved
    assert f"step-{step:08}" in saved or (phase, number, step) == ("build", TERMINATE, 0), saved
    again = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert again.code == 0, again
    assert job.losses() == straight


def close_terminal_at(text: bytes, words: Sequence[str], cwd: Path) -> int:
    """Run a command in a terminal that is closed when it shows `text`; the exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(cwd)
        os.execve(words[0], list(words), {**os.environ, "OMP_NUM_THREADS": "1", MARK: uuid.uuid4().hex})
    shown = b""
    while text not in shown:
        assert select.select([terminal], [], [], 60)[0], shown.decode()
        shown += os.read(terminal, 2**16)
    os.close(terminal)  # SIGHUP for the command, and EIO for whoever writes
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize(
    "words",
    [
        ["-n", "2"],
        pytest.param([], marks=pytest.mark.nightly),
        pytest.param(["-n", "2", "--set", "job.start=spawn"], marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_closed_terminal_ends_nothing(job: JobFile, words: list[str], straight: list[float]) -> None:
    job.sleeps(0.3).set(plugins={"load": ["slow"]})
    assert close_terminal_at(b"loss", hpctrain("run", "job.toml", *words), job.directory) == 0
    assert job.losses() == pytest.approx(straight, rel=2e-6)


POOL = """
import multiprocessing, os, time
from hpctrain.api import hookimpl

def double(x):
    return 2 * x

@hookimpl
def hpctrain_step_end(step):
    if step == 1:
        for _ in range(10):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                assert pool.map(double, [1, 2]) == [2, 4]
"""


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_workers_of_users_code_end(job: JobFile, start: str) -> None:
    """Pool.terminate() sends SIGTERM, which a rank answers with a save."""
    (job.directory / "pool.py").write_text(POOL)
    words = hpctrain("run", "job.toml", "-n", "2", "--set", f"job.start={start}")
    job.set(plugins={"load": ["pool"]})
    assert run(words, job.directory, 60).code == 0
