"""Tests that take too long for every run: `python -m pytest -m nightly`, hours on two cores.

Everything under every MPI, random cases by the hundreds, and the newest torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_ranks import ROOT, under_mpiexec

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(7200)]
TORCH = "2.15.0"
"""The newest that hpctrain supports; the other tests run with the oldest (constraints.txt)."""


@pytest.mark.parametrize(("ranks", "draws"), [(4, 200), (3, 100), (8, 50)])
def test_random_layouts(ranks: int, draws: int) -> None:
    words = ("tests/ranks/test_random_layouts.py", "--draws", str(draws), "--timeout", "7000")
    under_mpiexec(sys.executable, "MPICH", ranks, *words, timeout=7000)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_of_it_on_open_mpi(openmpi_python: str, ranks: int) -> None:
    under_mpiexec(openmpi_python, "Open MPI", ranks, timeout=3000)


def test_all_of_it_on_one_rank() -> None:
    under_mpiexec(sys.executable, "MPICH", 1, timeout=3000)


@pytest.mark.parametrize("file", ["test_job_files.py", "test_checkpoint_files.py"])
def test_damaged_files(file: str) -> None:
    draws = {"test_job_files.py": "20000", "test_checkpoint_files.py": "2000"}[file]
    words = ["-m", "pytest", "-p", "no:cacheprovider", f"tests/fuzz/{file}", "--draws", draws, "--timeout", "7000"]
    words += ["-m", ""]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=7000)


@pytest.mark.parametrize("who", ["all", "one"])
def test_killed_saves(who: str) -> None:
    words = ["benchmarks/checkpoint_kills.py", "--kills", "100", "--who", who]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, timeout=7000)


def test_the_first_week_of_a_new_user() -> None:
    """50 tasks as typed in a shell, with this environment's commands."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "tests/newuser/run.sh"],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
        timeout=7000,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def newest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of a virtual environment with the newest torch, and all that README's test command installs."""
    python = tmp_path_factory.mktemp("newest") / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(python.parent.parent)], check=True, timeout=120)
    words = [str(python), "-m", "pip", "install", "-q", f"torch=={TORCH}", "-e", f"{ROOT}[mpich,test]"]
    words += [word for path in sorted(ROOT.glob("plugins/*/pyproject.toml")) for word in ("-e", str(path.parent))]
    subprocess.run(words, check=True, timeout=3600)
    return str(python)


def test_the_newest_torch(newest: str) -> None:
    """The types, the tests in one process, and all tests on two ranks."""
    subprocess.run([newest, "-m", "mypy"], cwd=ROOT, check=True, timeout=900)
    rooms = [
        "tests/unit",
        "tests/fuzz",
        *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("plugins/*/tests/unit")),
    ]
    words = [newest, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not nightly", *rooms]
    subprocess.run(words, cwd=ROOT, check=True, timeout=3600)
    under_mpiexec(newest, "MPICH", 2, timeout=3000)
