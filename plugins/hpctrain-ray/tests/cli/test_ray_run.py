"""Jobs on a Ray cluster of two raylets: the same losses as on this machine, also after ranks and raylets are killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hpctrain_ray
import pytest
import ray_nodes
from conftest import JobFile
from launching import hpctrain, wait_until
from launching import run as typed

pytestmark = pytest.mark.nightly  # each starts a cluster, which takes half a minute on two cores

TIMES = [pytest.param(number, marks=[pytest.mark.thorough] if number else []) for number in range(5)]
STEPS = 30


@pytest.fixture
def cluster() -> Iterator[ray_nodes.Nodes]:
    made = ray_nodes.shared()
    made.complete()
    yield made
    wait_until(lambda: not ray_nodes.ranks(), 15, "ranks that end")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks over gloo that `hpctrain run` has started."""
    job = slow(JobFile(tmp_path_factory.mktemp("undisturbed")), 0.0)
    done = typed(hpctrain("run", str(job.path), "-n", "2"), job.directory)
    assert done.code == 0, done
    return job.losses()


@pytest.fixture(autouse=True)
def in_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def slow(job: JobFile, seconds: float = 0.15) -> JobFile:
    return job.sleeps(seconds).set(
        job={"steps": STEPS}, plugins={"load": ["slow"]}, checkpoint={"every_steps": 5}, communicator={"name": "gloo"}
    )


def in_thread(action: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Do something meanwhile; its result comes into the list."""
    found: list[Any] = []

    def do() -> None:
        try:
            found.append(action())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=do)
    thread.start()
    return thread, found


def test_two_raylets_have_the_losses_of_one_machine(
    cluster: ray_nodes.Nodes, undisturbed: list[float], job: JobFile, capfd: pytest.CaptureFixture[str]
) -> None:
    result = hpctrain_ray.run(slow(job, 0.0).path, 2, strategy="STRICT_SPREAD")
    said = capfd.readouterr()
    assert (result.exit_code, result.step, result.restarts) == (0, STEPS, 0), said
    assert result.losses == undisturbed
    assert "starting 2 ranks on" in said.err and "(1), " in said.err
    assert "step" in said.out


@pytest.mark.parametrize("number", TIMES)
def test_a_killed_rank_is_replaced(
    cluster: ray_nodes.Nodes, undisturbed: list[float], job: JobFile, number: int
) -> None:
    thread, found = in_thread(lambda: hpctrain_ray.run(slow(job).path, 2, strategy="STRICT_SPREAD"))
    job.wait_for_steps(7 + 2 * number)
    ray_nodes.ranks()[number % 2].kill()
    thread.join(120)
    [result] = found
    assert (result.exit_code, result.restarts) == (0, 1)
    assert result.losses == undisturbed


@pytest.mark.parametrize("number", TIMES)
def test_a_killed_ray_worker_takes_its_rank_along_and_is_replaced(
    cluster: ray_nodes.Nodes, undisturbed: list[float], job: JobFile, number: int
) -> None:
    thread, found = in_thread(lambda: hpctrain_ray.run(slow(job).path, 2, strategy="STRICT_SPREAD"))
    job.wait_for_steps(7 + 2 * number)
    before = ray_nodes.ranks()
    ray_nodes.attendants()[number % 2].kill()
    wait_until(lambda: not all(one.is_running() for one in before), 10, "a rank that ends with its Ray worker")
    thread.join(120)
    [result] = found
    assert (result.exit_code, result.restarts) == (0, 1)
    assert result.losses == undisturbed


@pytest.mark.parametrize("number", TIMES)
def test_a_killed_raylet_is_replaced_by_another_node(
    cluster: ray_nodes.Nodes, undisturbed: list[float], job: JobFile, number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    thread, found = in_thread(lambda: hpctrain_ray.run(slow(job).path, 2, strategy="STRICT_SPREAD"))
    job.wait_for_steps(7 + 2 * number)
    cluster.kill(busy(cluster)[number % 2])
    thread.join(150)
    [result] = found
    said = capfd.readouterr().err
    assert (result.exit_code, result.restarts) == (0, 1), said
    assert result.losses == undisturbed
    assert "left the cluster" in said


def busy(cluster: ray_nodes.Nodes) -> list[str]:
    """The nodes with a bundle of the placement group that is there now, by Ray's own state."""
    import ray

    groups = [one for one in ray.util.placement_group_table().values() if one["state"] == "CREATED"]
    return [cluster.name(node) for one in groups for node in one["bundles_to_node_id"].values()]
