"""The cores that each rank of a machine gets."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from hpctrain.contracts.identity import Identity
from hpctrain.ranks.binding import Binding, CpuBind, bound, places, topology
from hpctrain.ranks.meeting import World
from hpctrain.ranks.rank_channel import RankChannel

HERE = sorted(os.sched_getaffinity(0))


def test_the_system_s_cores(tmp_path: Path) -> None:
    for cpu, (numa, siblings) in enumerate([(0, "0,2"), (1, "1,3"), (0, "0,2"), (1, "1,3")]):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / f"node{numa}").mkdir()
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    # siblings stay together, and NUMA nodes
    assert topology({0, 1, 2, 3}, tmp_path) == [[0, 2], [1, 3]]
    assert topology({2, 3}, tmp_path) == [[2], [3]]
    assert topology({0, 7}, tmp_path / "none") == [[0], [7]]
    assert sorted(cpu for core in topology(HERE) for cpu in core) == HERE


def of_ranks(ranks: int, bind: CpuBind) -> list[Binding]:
    """Ranks as threads of this process: each thread has a mask of its own."""
    store, found, done = HashStore(), dict[int, Binding](), threading.Barrier(ranks)

    def rank(number: int) -> None:
        world = World(Identity(number, ranks, number, ranks), store, RankChannel(terminal=False))
        with bound(world, bind) as binding:
            found[number] = binding
            done.wait(30)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[number] for number in range(ranks)]


def test_ranks_of_containers_and_of_several_machines_are_told_apart() -> None:
    """By the machine, not by their local ranks; a rank that its launcher has bound has other CPUs."""
    reports = [("a", "0"), ("b", "0-1"), ("a", "1-2"), ("b", "0-1"), ("c", "0")]
    assert places(reports) == [(2, 1, 0), (2, 2, 0), (2, 1, 0), (2, 2, 1), (1, 1, 0)]


@pytest.fixture
def threads_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads_as_before")
def test_more_ranks_than_cores_share_them_and_are_told() -> None:
    cores = len(topology(HERE))
    for binding in of_ranks(cores + 1, "auto"):
        assert binding.cpus == HERE and binding.threads == 1 and not binding.by_hpctrain
        assert f"shared by {cores + 1} ranks, not bound" in binding.sentence
    assert sorted(os.sched_getaffinity(0)) == HERE


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.skipif(len(topology(HERE)) < 2, reason="needs two cores")
def test_each_rank_gets_as_many_cores() -> None:
    cores = topology(HERE)
    for ranks in range(2, len(cores) + 1):
        dealt = of_ranks(ranks, "auto")
        assert sorted(cpu for binding in dealt for cpu in binding.cpus) == HERE
        assert {binding.threads for binding in dealt} <= {len(cores) // ranks, -(-len(cores) // ranks)}


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.skipif(len(topology(HERE)) < 2, reason="needs two cores")
def test_none_only_shares_out_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    half = max(1, len(topology(HERE)) // 2)
    for binding in of_ranks(2, "none"):
        assert binding.cpus == HERE and binding.threads == half and "shared by 2 ranks, not bound" in binding.sentence
    for given, threads in (("3", 3), ("", half), ("0", half)):  # empty, as a batch script may leave it
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert all(binding.threads == threads for binding in of_ranks(2, "none"))


@pytest.mark.usefixtures("threads_as_before")
def test_a_rank_alone_keeps_all_cores() -> None:
    world = World(Identity(), HashStore(), RankChannel(terminal=False))
    with bound(world, "auto") as binding:
        assert binding.cpus == HERE and binding.threads == len(topology(HERE)) == torch.get_num_threads()
        assert binding.sentence == ""
