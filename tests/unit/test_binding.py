"""Which cores each rank of a machine gets."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from hpctrain.contracts.identity import Identity
from hpctrain.mpi.errors import spans
from hpctrain.ranks.binding import Binding, Core, CpuBind, bound, part_of, share_out, topology
from hpctrain.ranks.meeting import World
from hpctrain.ranks.rank_channel import RankChannel

HERE = sorted(os.sched_getaffinity(0))


def machine(numa_nodes: int, cores: int, siblings: int = 1) -> list[Core]:
    """Linux numbers the second CPUs of all cores after the first ones."""
    total = numa_nodes * cores
    return [
        Core(numa, tuple(numa * cores + core + total * thread for thread in range(siblings)))
        for numa in range(numa_nodes)
        for core in range(cores)
    ]


def dealt(cores: list[Core], ranks: int, homes: list[int | None] | None = None) -> list[str]:
    reports = [{"machine": "a", "mask": [0], "home": home, "why_not": ""} for home in homes or [None] * ranks]
    return [spans(sorted(part_of(cores, one["place"], one["alike"]))) for one in share_out(reports)]


def test_each_rank_gets_as_many_cores() -> None:
    assert dealt(machine(2, 8), 4) == ["0-3", "4-7", "8-11", "12-15"]
    assert dealt(machine(2, 8), 2) == ["0-7", "8-15"]
    assert dealt(machine(2, 8), 3) == ["0-4", "5-9", "10-15"]


def test_siblings_stay_together() -> None:
    assert dealt(machine(1, 4, siblings=2), 2) == ["0-1,4-5", "2-3,6-7"]
    assert dealt(machine(1, 4, siblings=2), 4) == ["0,4", "1,5", "2,6", "3,7"]


def test_ranks_get_cores_in_the_order_of_their_gpus_nodes() -> None:
    assert dealt(machine(2, 4), 2, [1, 0]) == ["4-7", "0-3"]
    assert dealt(machine(2, 4), 4, [1, 1, 0, 0]) == ["4-5", "6-7", "0-1", "2-3"]
    assert dealt(machine(2, 4), 2, [None, 0]) == ["4-7", "0-3"]


def test_the_system_s_cores(tmp_path: Path) -> None:
    for cpu, (numa, siblings) in enumerate([(0, "0,2"), (1, "1,3"), (0, "0,2"), (1, "1,3")]):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / f"node{numa}").mkdir()
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    assert topology({0, 1, 2, 3}, tmp_path) == [Core(0, (0, 2)), Core(1, (1, 3))]
    assert topology({2, 3}, tmp_path) == [Core(0, (2,)), Core(1, (3,))]
    assert topology({0, 7}, tmp_path / "none") == [Core(0, (0,)), Core(0, (7,))]
    assert sorted(cpu for core in topology(HERE) for cpu in core.cpus) == HERE


def of_ranks(ranks: int, bind: CpuBind) -> list[Binding]:
    """Ranks as threads of this process: each thread has a mask of its own."""
    store, found, done = HashStore(), dict[int, Binding](), threading.Barrier(ranks)

    def rank(number: int) -> None:
        world = World(Identity(number, ranks, number, ranks), store, RankChannel(terminal=False))
        with bound(world, torch.device("cpu"), bind) as binding:
            found[number] = binding
            done.wait(30)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [found[number] for number in range(ranks)]


def test_ranks_of_containers_and_of_several_machines_are_told_apart() -> None:
    """By the machine, not by their local ranks; a rank that its launcher has bound shares its cores with nobody."""

    def report(machine: str, mask: list[int]) -> dict[str, object]:
        return {"machine": machine, "mask": mask, "home": None, "why_not": ""}

    answers = share_out([report(*one) for one in [("a", [0]), ("b", [0, 1]), ("a", [1, 2]), ("b", [0, 1]), ("c", [0])]])
    assert [answer["sharing"] for answer in answers] == [1, 2, 1, 2, 1]
    assert [answer["alike"] for answer in answers] == [1, 2, 1, 2, 1]
    assert [answer["place"] for answer in answers] == [0, 0, 0, 1, 0]
    assert [answer["ranks"] for answer in answers] == [2, 2, 2, 2, 1]
    mixed = share_out([report("a", [0, 1]), report("a", [0, 1, 2, 3]), report("a", [0, 1, 2, 3])])
    assert [(answer["sharing"], answer["alike"]) for answer in mixed] == [(3, 1), (3, 2), (3, 2)]


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
        assert binding.cpus == set(HERE) and binding.threads == 1 and not binding.by_hpctrain
        assert f"{cores + 1} ranks on {cores} core" in binding.told
    assert sorted(os.sched_getaffinity(0)) == HERE


@pytest.mark.usefixtures("threads_as_before")
@pytest.mark.skipif(len(topology(HERE)) < 2, reason="needs two cores")
def test_none_only_shares_out_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    half = max(1, len(topology(HERE)) // 2)
    for binding in of_ranks(2, "none"):
        assert binding.cpus == set(HERE) and binding.threads == half and 'cpu_bind is "none"' in binding.told
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    assert all("OMP_PROC_BIND is set" in binding.told for binding in of_ranks(2, "auto"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert all(binding.threads == 3 for binding in of_ranks(2, "none"))


@pytest.mark.usefixtures("threads_as_before")
def test_a_rank_alone_keeps_all_cores() -> None:
    world = World(Identity(), HashStore(), RankChannel(terminal=False))
    with bound(world, torch.device("cpu"), "auto") as binding:
        assert binding.cpus == set(HERE) and binding.threads == len(topology(HERE)) == torch.get_num_threads()
        assert binding.told == ""
