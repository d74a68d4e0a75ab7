"""A signal at any moment, to the starter or to one rank: one checkpoint, exit 75, then the same losses with the same command."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import JobFile
from launching import SOON, TERMINATE, Finished, hpctrain, run, started, wait_until

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
            next(one for one in command.ranks() if one.environ()["PMI_RANK"] == str(only)).send_signal(number)
        return command.finish(60)


@pytest.mark.always
@pytest.mark.parametrize(
    ("phase", "number", "only"),
    [
        ("evaluation", SOON, 1),
        *(
            pytest.param(*case, marks=pytest.mark.thorough)
            for case in (
                ("build", SOON, 1), ("forward", SOON, 1), ("evaluation", SOON, None), ("save", SOON, 1), ("save", TERMINATE, None),
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
    assert step < STEPS and f"step-{step:08}" in saved and not [name for name in saved if name.endswith(".tmp")], saved
    again = run(hpctrain("run", "job.toml", "-n", "2"), job.directory)
    assert again.code == 0, again
    assert job.losses() == straight
