"""Runs tests on every rank: `mpiexec -n 4 python -m pytest tests/ranks plugins/*/tests/ranks`. A plugin of pytest's.

All ranks run the same tests in the same order, and meet after each test. If a rank failed and the others do not come (they wait
for it inside the test), or if a test takes longer than LIMIT, the stacks are shown and the world is ended. Rank 0 reports
progress; a failure is printed by its rank.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from late_group import LateGroup

import hpctrain.mpi
from hpctrain.base.devices import accelerator_count, use_device
from hpctrain.mpi.library import MPI
from hpctrain.mpi.process_group import creation
from hpctrain.ranks.restricted_pickle import restrict_objects

CROWD = max(1, MPI.COMM_WORLD.size // 2 // (os.cpu_count() or 1))
LIMIT = 60.0 * CROWD  # seconds for one test; longer where the ranks share cores
PATIENCE = 20.0  # seconds that a failed rank waits for the others

_failed = pytest.StashKey[bool]()
_STDERR = sys.stderr
_UNPRINTED: list[str] = []
"""Failures of rank 0, which pytest prints at the end; if the world is ended before, `_end` does."""
_SKIPPED: list[str] = []
"""Tests that this number of ranks can't run."""


@dataclass(frozen=True)
class World:
    """This process's rank and world size, and a gloo group over the same ranks to compare with."""

    rank: int
    size: int
    gloo: dist.ProcessGroup


@pytest.hookimpl(trylast=True)  # the terminal reporter is made by then
def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(n): needs at least n ranks")
    config.addinivalue_line(
        "markers", "shown_on(n, ...): of several ranks these numbers are enough, but for the table of --equivalence"
    )
    global _STDERR, LIMIT
    if config.getoption("--device") == "sim":
        import simulated

        simulated.register()
        LIMIT *= 3  # each operator copies its tensors to the CPU
    _STDERR = os.fdopen(
        os.dup(2), "w"
    )  # nothing is captured here; in a test, file descriptor 2 leads into pytest's file
    if MPI.COMM_WORLD.rank:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        reporter._tw._file = io.StringIO()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    size, table = MPI.COMM_WORLD.size, config.getoption("--equivalence")
    listed = config.getoption("--each-once")
    if listed is not None:
        skipped = listed.read_text().splitlines() if listed.exists() else []
        elsewhere = [item for item in items if _home(item) != size and item.nodeid not in skipped]
        items[:] = [item for item in items if item not in elsewhere]
        config.hook.pytest_deselected(items=elsewhere)
    for item in items:
        needed, shown = item.get_closest_marker("ranks"), item.get_closest_marker("shown_on")
        if needed and size < needed.args[0]:
            item.add_marker(pytest.mark.skip(f"needs {needed.args[0]} ranks"))
        elif table is not None and "record" in item.fixturenames:
            continue
        elif shown and size > 1 and size not in shown.args:
            item.add_marker(pytest.mark.skip(f"shown on {' and '.join(map(str, shown.args))} ranks"))


def _home(item: pytest.Item) -> int:
    """The number of ranks for a test that runs on one number only: 3 finds what is uneven, unless it is shown on others."""
    needed, shown = item.get_closest_marker("ranks"), item.get_closest_marker("shown_on")
    least = needed.args[0] if needed else 1
    fit = sorted(number for number in (shown.args if shown else (3, least)) if number >= least)
    return 3 if 3 in fit else fit[0]


@pytest.fixture(scope="session")
def world(pytestconfig: pytest.Config) -> Iterator[World]:
    torch.set_num_threads(1)
    if pytestconfig.getoption("--late"):
        creation.MPIProcessGroup = LateGroup  # type: ignore[misc]
        # what a group of its own gets that a program makes for an accelerator: its ranks share this machine's
        dist.Backend.default_device_backend_map[pytestconfig.getoption("--device")] = hpctrain.mpi.BACKEND
    use_device(training_device(pytestconfig))
    dist.init_process_group(hpctrain.mpi.BACKEND, init_method="mpi://", timeout=timedelta(seconds=LIMIT))
    assert isinstance(dist.group.WORLD, LateGroup) == pytestconfig.getoption("--late")
    restrict_objects()  # as where ranks meet
    yield World(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo"))
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def device(world: World, pytestconfig: pytest.Config) -> torch.device:
    """The device on which this rank trains."""
    return training_device(pytestconfig)


def training_device(config: pytest.Config) -> torch.device:
    """The device on which tests train on this rank."""
    kind = config.getoption("--device")
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, MPI.COMM_WORLD.rank % accelerator_count())


@pytest.fixture
def root(world: World) -> Iterator[Path]:
    """One empty directory for all ranks."""
    name = [tempfile.mkdtemp(prefix="hpctrain-") if world.rank == 0 else ""]
    dist.broadcast_object_list(name, src=0)
    yield Path(name[0])
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(name[0])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--each-once",
        type=Path,
        metavar="FILE",
        help="run each test on one number of ranks only, mostly 3, and those that an earlier run skipped and listed in FILE",
    )
    parser.addoption(
        "--late", action="store_true", help="communicate by a group whose results come late, as an accelerator's do"
    )
    parser.addoption(
        "--device",
        default="cpu",
        help="train on this kind of device, with --late: the ranks share those of this machine; sim: a simulated one",
    )
    parser.addoption(
        "--equivalence", type=Path, help="append what the equivalence tests found to this file (JSON lines)"
    )
    parser.addoption("--planned", type=Path, help="append what tests of plans and architectures found to this file")


@pytest.fixture
def record(world: World, pytestconfig: pytest.Config) -> Callable[..., None]:
    """Records a run's deviation from a single process, for docs/equivalence.md (see tests/equivalence_table.py)."""

    def note(
        precision: str, layout: str, found: dict[str, float], optimizer: str, accumulated: bool, checkpointing: str
    ) -> None:
        path = pytestconfig.getoption("--equivalence")
        if path is not None and world.rank == 0:
            row = {"ranks": world.size, "precision": precision, "layout": layout, **found, "optimizer": optimizer}
            row |= {"accumulated": accumulated, "checkpointing": checkpointing}
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")

    return note


def pytest_sessionfinish(session: pytest.Session) -> None:
    listed = session.config.getoption("--each-once")
    if listed is not None and MPI.COMM_WORLD.rank == 0:
        listed.write_text("".join(f"{name}\n" for name in _SKIPPED))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _SKIPPED.append(report.nodeid)
    if report.failed:
        text = f"\n[rank {MPI.COMM_WORLD.rank}] FAILED {report.nodeid}\n{report.longreprtext}"
        if MPI.COMM_WORLD.rank:
            print(text, file=sys.stderr, flush=True)
        else:
            _UNPRINTED.append(text)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    report = yield
    if report.failed:
        item.stash[_failed] = True
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None):
    watch = threading.Timer(LIMIT, _end, [f"{item.nodeid} took longer than {LIMIT:g} s"])
    watch.daemon = True
    watch.start()
    try:
        result = yield
        if MPI.COMM_WORLD.size > 1:
            _meet(item)
        return result
    finally:
        watch.cancel()


def _meet(item: pytest.Item) -> None:
    """Go on to the next test together, or not at all."""
    failed = item.stash.get(_failed, False)
    patience = time.monotonic() + (PATIENCE if failed else 2 * LIMIT)
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        if time.monotonic() > patience:
            _end(f"{item.nodeid} failed here and the other ranks still wait inside it")
        time.sleep(0.001)


def _end(reason: str) -> None:
    print(*_UNPRINTED, f"\n[rank {MPI.COMM_WORLD.rank}] {reason}: ending all ranks", file=_STDERR, flush=True)
    faulthandler.dump_traceback(_STDERR, all_threads=True)
    MPI.COMM_WORLD.Abort(1)
