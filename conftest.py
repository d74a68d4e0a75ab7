"""The common part of all tests: those of tests/ and those of each distribution, plugins/*/tests, in folders of the same names.

The folders `ranks` are collected only in a process that mpiexec started (see tests/test_ranks.py), which tests/on_ranks.py runs.
"""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import gettempdir

import open_mpi
import pytest
from hypothesis import HealthCheck, settings
from jobs import JobFile
from launching import forget_modules
from packages import untested

from hpctrain.base.launcher_variables import launched

# with it, every process that a test starts compiles hpctrain, for half a second
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
if "PYTEST_XDIST_WORKER" in os.environ:
    # before torch: threads of two workers that wait for each other take ten times as long
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# a busy machine must not fail a test
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

pytest_plugins = ["on_ranks"] if launched() else []
collect_ignore_glob = [] if launched() else ["tests/ranks", "plugins/*/tests/ranks"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draws", type=int, help="how many random cases to draw, instead of the few of every run")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    line = untested(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
    if line:
        terminalreporter.write_sep("=", line, yellow=True)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let tests run alone that start tests on ranks: ranks that wait are busy, and more processes than cores take far longer."""
    if "PYTEST_XDIST_WORKER" not in os.environ or launched():
        return (yield)
    alone = item.path.name in ("test_ranks.py", "test_nightly.py")
    with ExitStack() as files:
        names = (f"hpctrain-tests-{os.getuid()}-{name}" for name in ("turn", "room"))
        turn, room = (files.enter_context(Path(gettempdir(), name).open("w")) for name in names)
        fcntl.flock(turn, fcntl.LOCK_EX)  # who waits to be alone keeps others from coming in
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(turn, fcntl.LOCK_UN)
        return (yield)


_ORDER = ("test_ranks", "slurm", "faults", "outside", "cli", "fuzz", "unit")
"""With `pytest -n 2`, what takes long begins first: files and folders of tests."""


def pytest_configure(config: pytest.Config) -> None:
    """A worker takes a whole file, whose tests may share what takes long to make."""
    if config.getoption("numprocesses", None):
        config.option.dist, config.option.loadscopereorder = "loadfile", False


def _place(item: pytest.Item) -> int:
    """By the first name below the folder of tests: "cli" for tests/cli/test_run.py and plugins/NAME/tests/cli/test_more.py."""
    parts = item.path.parts
    name = parts[parts.index("tests") + 1].removesuffix(".py")
    return _ORDER.index(name) if name in _ORDER else len(_ORDER)


_TIERS = ("default", "thorough", "nightly")
"""Tests of the default tier have no marker."""
_LIMIT = 60
"""Seconds for a test of the default tier that has no limit of its own."""


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector: pytest.Collector) -> Generator[None, object, object]:
    """Give the cases of a test their tiers: `cases(TIER=[ID, ...], rest=TIER)`. Those with a tier of their own keep it."""
    collected = yield
    tests = [item for item in collected if isinstance(item, pytest.Function)] if isinstance(collected, list) else []
    cases = next((test.get_closest_marker("cases") for test in tests), None)
    if cases is not None:
        tiers = {name: tier for tier, names in cases.kwargs.items() if tier != "rest" for name in names}
        unknown = tiers.keys() - {test.callspec.id for test in tests}
        if unknown or {*tiers.values(), cases.kwargs.get("rest", "default")} - {*_TIERS}:
            raise collector.CollectError(f"{tests[0].originalname} has no cases {sorted(unknown)}, or no such tiers")
        for test in tests:
            tier = tiers.get(test.callspec.id, cases.kwargs.get("rest", "default"))
            if tier != "default" and _tier(test) == "default":
                test.add_marker(tier)
    return collected


def _tier(item: pytest.Item) -> str:
    return next((mark.name for mark in item.iter_markers() if mark.name in _TIERS), "default")


@pytest.hookimpl(tryfirst=True)  # pytest leaves out by markers then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if _tier(item) == "default" and not item.get_closest_marker("timeout") and not config.getoption("timeout"):
            item.add_marker(pytest.mark.timeout(_LIMIT))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=_place)


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """`hpctrain.run` ends with a collection, which would take a fifth of a second to look through torch."""
    gc.collect()  # only through what came since the last module
    gc.freeze()


@pytest.fixture(autouse=True)
def _modules_end_with_their_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test's own modules are forgotten, as the next one may have another of the same name, and the signals that it blocked."""
    before = set(sys.modules)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    forget_modules(before, tmp_path_factory.getbasetemp())


@pytest.fixture
def job(tmp_path: Path) -> JobFile:
    return JobFile(tmp_path)


@pytest.fixture(scope="session")
def openmpi_python() -> str:
    """A Python with Open MPI instead of MPICH and everything else of this environment."""
    if not open_mpi.is_made():
        pytest.skip(f"{sys.executable} tests/open_mpi.py makes the environment of this test")
    return str(open_mpi.PYTHON)
