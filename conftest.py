"""The common part of all tests: those of tests/ and those of each distribution, plugins/*/tests, in folders of the same names.

The folders `ranks` are collected only in a process that mpiexec started (see tests/test_ranks.py), which tests/on_ranks.py runs.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import open_mpi
import pytest
import tomli_w
from hypothesis import HealthCheck, settings
from launching import wait_until
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
_APART = ("cli", "faults")
"""Whose tests share nothing, so that any worker takes any of them. Elsewhere one worker takes a whole file, and one takes all that
needs the Slurm."""
_WHOLE = ("test_ray_cluster.py", "test_own_loops.py")
"""Files of these folders whose tests share something that takes long to make."""


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None):
        config.option.dist, config.option.loadscopereorder = "loadscope", False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests that one worker takes together. Groups by xdist's own marker have no effect since pytest 9.2."""
    from xdist.scheduler import LoadScopeScheduling

    class Rooms(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = Path(nodeid.partition("::")[0])
            room = _room(path)
            return "slurm" if room == "slurm" else nodeid if room in _APART and path.name not in _WHOLE else str(path)

    return Rooms(config, log)


def _room(path: Path) -> str:
    """The first name below the folder of tests: "cli" for tests/cli/test_run.py and plugins/NAME/tests/cli/test_more.py."""
    return path.parts[path.parts.index("tests") + 1].removesuffix(".py")


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
        rooms = {item: _room(item.path.relative_to(config.rootpath)) for item in items}
        items.sort(key=lambda item: _ORDER.index(rooms[item]) if rooms[item] in _ORDER else len(_ORDER))


TINY: dict[str, Any] = {
    "job": {"name": "tiny", "steps": 4, "output_dir": "out"},
    "model": {
        "name": "gpt", "hidden_size": 16, "layers": 2, "attention_heads": 2, "vocab_size": 64, "max_seq_length": 8,
    },
    "dataset": {"name": "synthetic", "samples": 500},
    "optimizer": {"name": "adamw", "lr": 0.01},
    "batch": {"global_size": 12, "micro_size": 1},
}  # fmt: skip
"""A job that trains in milliseconds; 12 samples divide over 1, 2, 3 and 4 ranks."""


class JobFile:
    """job.toml in its own directory, changed key by key."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / "job.toml"
        self.tables = json.loads(json.dumps(TINY))
        self.write()

    def set(self, **tables: dict[str, Any]) -> JobFile:
        """Merge `tables` into the job, and write the file."""
        for name, table in tables.items():
            self.tables.setdefault(name, {}).update(table)
        self.write()
        return self

    def write(self) -> None:
        self.path.write_text(tomli_w.dumps(self.tables))

    @property
    def output(self) -> Path:
        return self.directory / str(self.tables["job"]["output_dir"])

    def sleeps(self, seconds: float) -> JobFile:
        """A plugin `slow` beside the job, with which each step takes so much longer; the job or a command must load it."""
        (self.directory / "slow.py").write_text(
            "import time\n\nfrom hpctrain.api import hookimpl\n\n\n"
            f"@hookimpl\ndef hpctrain_step_end(step):\n    time.sleep({seconds})\n"
        )
        return self

    def wait_for_steps(self, steps: int, seconds: float = 90) -> None:
        """Return when metrics.jsonl has so many lines."""
        path = self.output / "metrics.jsonl"
        wait_until(lambda: path.exists() and path.read_text().count("\n") >= steps, seconds, f"{steps} steps")

    def rows(self, output: str | None = None) -> list[dict[str, Any]]:
        """The steps' rows of metrics.jsonl. A last line that is being written does not count."""
        path = (self.directory / output if output else self.output) / "metrics.jsonl"
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in map(json.loads, whole) if "loss" in row]

    def losses(self, output: str | None = None) -> list[float]:
        return [row["loss"] for row in self.rows(output)]


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage() -> None:
    """`hpctrain.run` ends with a collection, which would take a fifth of a second to look through torch."""
    gc.collect()  # only through what came since the last module
    gc.freeze()


@pytest.fixture(autouse=True)
def _modules_end_with_their_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test's own modules are forgotten, as the next one may have another of the same name, and the signals that it blocked."""
    before, directory = set(sys.modules), f"{tmp_path_factory.getbasetemp()}{os.sep}"
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "") or "").startswith(directory):
            del sys.modules[name]


@pytest.fixture
def job(tmp_path: Path) -> JobFile:
    return JobFile(tmp_path)


@pytest.fixture(scope="session")
def openmpi_python() -> str:
    """A Python with Open MPI instead of MPICH and everything else of this environment."""
    if not open_mpi.is_made():
        pytest.skip(f"{sys.executable} tests/open_mpi.py makes the environment of this test")
    return str(open_mpi.PYTHON)
