"""The fixture `cluster`: a Ray cluster of several raylets on this machine. Nodes come, and are killed; nothing is left running."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import wait_until

# before ray is imported: a raylet that is killed is to be noticed within seconds, as in the tests' time
os.environ.setdefault("RAY_health_check_initial_delay_ms", "1000")
os.environ.setdefault("RAY_health_check_period_ms", "1000")
os.environ.setdefault("RAY_health_check_failure_threshold", "3")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
os.environ.setdefault("RAY_enable_worker_prestart", "0")

_MARK = "HPCTRAIN_RAY_TESTS"
os.environ[_MARK] = uuid.uuid4().hex
"""Inherited by all processes of this process's cluster: another one may run beside it."""

SPECS: dict[str, dict[str, float]] = {
    "a": {"cpus": 4, "gpus": 1, "seat": 1, "fast": 1},
    "b": {"cpus": 4, "gpus": 1, "seat": 1},
    "c": {"cpus": 1, "gpus": 0, "seat": 1},
}
"""The nodes that each test finds."""


class Nodes:
    """The nodes of a cluster by names of the tests'. The head has none of its resources for ranks."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, "num_gpus": 0}
        )
        self._named: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """The address of the head."""
        return str(self._cluster.address)

    def add(self, name: str) -> None:
        """Start a node of SPECS."""
        spec = dict(SPECS[name])
        cpus, gpus = int(spec.pop("cpus")), int(spec.pop("gpus"))
        self._named[name] = self._cluster.add_node(wait=False, num_cpus=cpus, num_gpus=gpus, resources=spec)

    def id(self, name: str) -> str:
        """Ray's name of a node."""
        return str(self._named[name].node_id)

    def name(self, id: str) -> str:
        """The tests' name of a node."""
        return next(name for name in self._named if self.id(name) == id)

    def kill(self, name: str) -> None:
        """SIGKILL a node's raylet."""
        [raylet] = self._named.pop(name).all_processes["raylet"]
        raylet.process.kill()
        raylet.process.wait(20)  # its workers take a raylet that nobody has waited for as one that runs

    def complete(self) -> None:
        """Start the nodes that were killed, and wait until all are alive and free. Needs a connection."""
        import ray

        for name in SPECS.keys() - self._named.keys():
            self.add(name)
        wait_until(lambda: sum(one["Alive"] for one in ray.nodes()) == len(SPECS) + 1, 90, "all nodes")
        wait_until(lambda: ray.available_resources().get("CPU", 0.0) == 9, 60, "all CPUs")

    def close(self) -> None:
        """End all nodes."""
        import ray

        ray.shutdown()
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A cluster of the nodes of SPECS, to which this process is connected. Its start takes 20 s to 40 s on two cores."""
    import ray

    made = Nodes()
    try:
        for name in SPECS:
            made.add(name)
        ray.init(address=made.address, namespace="tests", logging_level="ERROR", log_to_driver=False)
        yield made
    finally:
        made.close()


@pytest.fixture
def cluster(nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """The cluster, complete and free, and an empty working directory; all ranks have ended after the test."""
    monkeypatch.chdir(tmp_path)
    nodes.complete()
    yield nodes
    wait_until(lambda: not ranks() and not learners(), 15, "ranks that end")


def ranks() -> list[psutil.Process]:
    """The processes that train a job of this cluster, as attendants have started them."""
    return _processes(lambda words: "--started-by" in words and any("hpctrain-ray-" in word for word in words))


def attendants() -> list[psutil.Process]:
    """The Ray workers that attend ranks. Ray gives them the title of their class."""
    return _processes(lambda words: " ".join(words).startswith("ray::Attendant"))


def learners() -> list[psutil.Process]:
    """The Ray workers that are ranks of a Training."""
    return _processes(lambda words: " ".join(words).startswith("ray::LearnerRank"))


def supervisors() -> list[psutil.Process]:
    """The Ray workers that are supervisors of submitted jobs."""
    return _processes(lambda words: " ".join(words).startswith("ray::DetachedSupervisor"))


def _processes(chosen: Callable[[list[str]], bool]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            # what gives itself a title may write over its variables: its raylet has them, too
            family = [process, *process.parents()[:1]]
            if chosen(process.cmdline()) and any(one.environ().get(_MARK) == os.environ[_MARK] for one in family):
                found.append(process)
        except psutil.Error:
            continue
    return found
