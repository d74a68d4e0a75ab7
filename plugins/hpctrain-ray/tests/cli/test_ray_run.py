"""Jobs on a Ray cluster of two raylets: the same losses as on this machine, also after ranks and raylets are killed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import hpctrain_ray
import pytest
import ray_nodes
from jobs import JobFile
from launching import hpctrain, wait_until
from launching import run as typed
from ray_nodes import cluster, nodes

pytestmark = pytest.mark.nightly  # each starts a cluster, which takes half a minute on two cores

STEPS = 30


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of two ranks over gloo that `hpctrain run` has started."""
    job = slow(JobFile(tmp_path_factory.mktemp("undisturbed")), 0.0)
    done = typed(hpctrain("run", str(job.path), "-n", "2"), job.directory)
    assert done.code == 0, done
    return job.losses()


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


def test_ranks_on_two_raylets_talk_over_mpi(
    cluster: ray_nodes.Nodes, job: JobFile, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two ranks on one node and one on another: MPI finds out by PMI, which Ray carries."""
    result = hpctrain_ray.run(job.set(communicator={"name": "mpi"}).path, 3, cpus=2)
    said = capfd.readouterr()
    assert result.exit_code == 0 and "3 (mpi)" in said.out and "(2), " in said.err, said
    (job.directory / "here").mkdir()
    here = JobFile(job.directory / "here")
    done = typed(hpctrain("run", str(here.set(communicator={"name": "mpi"}).path), "-n", "3"), here.directory)
    assert done.code == 0 and result.losses == pytest.approx(here.losses(), rel=2e-6), done


@pytest.mark.parametrize("number", range(5))
@pytest.mark.parametrize("what", ["rank", "Ray worker", "raylet"])
def test_what_is_killed_is_replaced(
    cluster: ray_nodes.Nodes,
    undisturbed: list[float],
    job: JobFile,
    what: str,
    number: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    thread, found = in_thread(lambda: hpctrain_ray.run(slow(job).path, 2, strategy="STRICT_SPREAD"))
    job.wait_for_steps(7 + 2 * number)
    before = ray_nodes.ranks()
    if what == "raylet":
        cluster.kill(busy(cluster)[number % 2])
    else:
        (before if what == "rank" else ray_nodes.attendants())[number % 2].kill()
    wait_until(lambda: not all(one.is_running() for one in before), 10, "a rank that ends with what is killed")
    thread.join(150)
    [result] = found
    said = capfd.readouterr().err
    assert (result.exit_code, result.restarts) == (0, 1), said
    assert result.losses == undisturbed
    assert ("left the cluster" in said) == (what == "raylet")


def busy(cluster: ray_nodes.Nodes) -> list[str]:
    """The nodes with a bundle of the placement group that is there now, by Ray's own state."""
    import ray

    groups = [one for one in ray.util.placement_group_table().values() if one["state"] == "CREATED"]
    return [cluster.name(node) for one in groups for node in one["bundles_to_node_id"].values()]
