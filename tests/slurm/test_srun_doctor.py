"""`srun hpctrain doctor` on two nodes: healthy, with the wrong --mpi, a slowed link, and directories that differ."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launching import Finished, hpctrain

from slurm.cluster import NODES, Cluster

pytestmark = pytest.mark.timeout(180)

FOUR = ["srun", "-K", "-N2", "-n4", "--ntasks-per-node=2"]


def rows(done: Finished, check: str) -> list[dict[str, Any]]:
    """The findings of `check`, from --json."""
    return [row for row in map(json.loads, done.out.splitlines()) if row["check"] == check]


@contextmanager
def slowed(cluster: Cluster, rate: str) -> Iterator[None]:
    """The network of every node at `rate`, in both directions."""
    for node in NODES:
        words = [*cluster.inside(node), "tc", "qdisc", "add", "dev", "eth0", "root", "tbf"]
        subprocess.run([*words, "rate", rate, "burst", "64kb", "latency", "400ms"], check=True, timeout=30)
    try:
        yield
    finally:
        for node in NODES:
            subprocess.run([*cluster.inside(node), "tc", "qdisc", "del", "dev", "eth0", "root"], check=True, timeout=30)


@pytest.mark.nightly
def test_two_nodes_over_mpi_and_a_slowed_link(cluster: Cluster, tmp_path: Path) -> None:
    command = [*FOUR, "--mpi=pmi2", *hpctrain("doctor", "--json")]
    done = cluster.run(command, tmp_path)
    assert done.code == 0, done
    assert rows(done, "launcher")[0]["found"].startswith("4 ranks on 2 nodes over MPI"), done
    assert [row["state"] for row in rows(done, "links of nodes")] == ["ok"], done
    assert {row["nodes"][0] for row in rows(done, "shared memory")} == {"node1"} or len(
        rows(done, "shared memory")
    ) == 2
    (shared,) = rows(done, "output directory")
    assert shared["state"] == "ok" and shared["nodes"] == ["node1", "node2"] and shared["ranks"] == [0, 2], done
    with slowed(cluster, "80mbit"):
        done = cluster.run(command, tmp_path, timeout=150)
    assert done.code == 0, done
    slow = [row for row in rows(done, "links of nodes") if row["state"] == "warn"]
    assert [row["ranks"] for row in slow] == [[0, 3], [1, 2]] or [row["ranks"] for row in slow] == [[1, 2], [3, 0]], (
        done
    )
    assert all(set(row["nodes"]) == {"node1", "node2"} for row in slow), done
    assert "rank 1 on node1 and rank 2 on node2" in json.dumps(slow), done
    assert all(row["state"] == "ok" for row in rows(done, "links in nodes")), done


@pytest.mark.nightly
def test_the_wrong_mpi(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run([*FOUR, "--mpi=none", *hpctrain("doctor")], tmp_path)
    assert done.code == 0 and done.out.count("warn  launcher") == 1, done
    assert "srun started 4 tasks without an MPI that fits" in done.out and "--mpi=pmi2" in done.out, done
    assert "communicator       gloo" in done.out, done


@pytest.mark.nightly
def test_a_directory_of_each_nodes_own(cluster: Cluster, tmp_path: Path) -> None:
    done = cluster.run(
        [*FOUR, "--mpi=pmi2", *hpctrain("doctor", "--json", "--directory", str(cluster.local))], tmp_path
    )
    assert done.code == 3, done
    (bad,) = (row for row in rows(done, "output directory") if row["state"] == "fail")
    assert bad["ranks"] == [2] and bad["nodes"] == ["node2"] and "not rank 0's directory" in bad["found"], done


@pytest.mark.nightly
def test_ranks_that_cannot_communicate(cluster: Cluster, tmp_path: Path) -> None:
    """The ranks meet over the network, but gloo is told to use each node's loopback. What was found before is told."""
    words = [*FOUR, "--mpi=none", *hpctrain("doctor", "--json")]
    done = cluster.run(words, tmp_path, env={"GLOO_SOCKET_IFNAME": "lo"}, timeout=150)
    assert done.code != 0 and "hpctrain: gloo: group" in done.err and "still connecting" in done.err, done
    assert "Connection refused, remote=[127.0.0.1]" in done.err and "GLOO_SOCKET_IFNAME" in done.err, done
    assert rows(done, "open files") and not rows(done, "links of nodes"), done
