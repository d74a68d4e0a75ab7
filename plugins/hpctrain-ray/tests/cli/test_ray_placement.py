"""Where ranks are placed, by Ray's own state: strategies, different workers, parts of GPUs, time limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hpctrain_ray
import pytest
import ray_nodes
from hpctrain_ray.order import Bundle, Order
from hpctrain_ray.placement import Placed, place
from hpctrain_ray.seats import Seat, take_seats
from jobs import JobFile
from ray_nodes import cluster, nodes

from hpctrain.api import EnvironmentUnfitError, UsageError

pytestmark = pytest.mark.nightly  # each starts a cluster, which takes half a minute on two cores


def placed(bundles: list[Bundle], strategy: str, limit: float = 20.0, **options: Any) -> Placed | None:
    order = Order(Path("job.toml"), Path.cwd(), Path("out"), bundles, strategy, limit, **options)  # type: ignore[arg-type]
    return place(order, lambda: False, lambda text: None)


def nodes_of(found: Placed) -> list[str]:
    """The node of each bundle, as the cluster has it."""
    import ray

    table = ray.util.placement_group_table(found.group)
    assert table["state"] == "CREATED"
    return [table["bundles_to_node_id"][index] for index in range(len(found.bundles))]


@pytest.mark.parametrize(("strategy", "count"), [("STRICT_PACK", 1), ("PACK", 1), ("SPREAD", 2), ("STRICT_SPREAD", 2)])
def test_strategies(cluster: ray_nodes.Nodes, strategy: str, count: int) -> None:
    found = placed([Bundle(1)] * 2, strategy)
    assert found is not None and len(set(nodes_of(found))) == count
    found.remove()


def test_different_workers_and_parts_of_gpus(cluster: ray_nodes.Nodes) -> None:
    import ray

    bundles = [Bundle(1, 0.5, {"fast": 1}), Bundle(2, 0.5), Bundle(3, 1.0)]
    found = placed(bundles, "PACK")
    assert found is not None
    table = ray.util.placement_group_table(found.group)
    assert [table["bundles"][index] for index in range(3)] == [one.as_ray() for one in bundles]
    nodes = nodes_of(found)
    assert nodes == [cluster.id("a"), cluster.id("a"), cluster.id("b")]
    free = ray.available_resources()
    assert free["CPU"] == 3 and "GPU" not in free and "fast" not in free
    found.remove()


def test_ranks_of_different_workers_train_where_they_were_placed(cluster: ray_nodes.Nodes, job: JobFile) -> None:
    import ray

    seen: dict[str, Any] = {}

    def seen_seats(*given: Any) -> list[Seat]:
        seats = take_seats(*given)
        seen["nodes"], seen["bundles"] = [one.node.id for one in seats], [one.bundle for one in seats]
        groups = ray.util.placement_group_table().values()
        seen["states"] = [one["state"] for one in groups if one["state"] != "REMOVED"]
        return seats

    workers = [{"cpus": 3, "gpus": 1}, {"cpus": 1, "gpus": 0.5, "resources": {"fast": 1}, "count": 1}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpctrain_ray.group.take_seats", seen_seats)
        result = hpctrain_ray.run(job.set(communicator={"name": "gloo", "device": "cpu"}).path, workers=workers)
    assert result.exit_code == 0
    assert seen["nodes"] == [cluster.id("b"), cluster.id("a")]
    assert [one.gpus for one in seen["bundles"]] == [1, 0.5] and seen["states"] == ["CREATED"]
    start = json.loads((job.output / "starts.jsonl").read_text().splitlines()[0])
    assert start["ranks"] == 2


def test_no_room_is_told_with_the_resources_that_there_are(cluster: ray_nodes.Nodes, job: JobFile) -> None:
    with pytest.raises(EnvironmentUnfitError) as told:
        hpctrain_ray.run(job.path, 2, cpus=5, placement_limit=2, strategy="SPREAD")
    assert "within 2 s for 2 x (5 CPU) with strategy SPREAD" in str(told.value)
    assert "9 of 9 CPU free" in str(told.value)


def test_wrong_options_are_told(cluster: ray_nodes.Nodes, job: JobFile) -> None:
    with pytest.raises(UsageError, match="strategy"):
        hpctrain_ray.run(job.path, 2, strategy="TIGHT")
    with pytest.raises(UsageError, match="workers: found 1, expected one for each of 2 ranks"):
        hpctrain_ray.run(job.path, 2, workers=[{"cpus": 2}])
    with pytest.raises(UsageError, match="expected cpus, gpus or resources above 0"):
        hpctrain_ray.run(job.path, 2, cpus=0)
