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
from hpctrain.ranks.binding import Binding, Core, CpuBind, _share_out, bound, shares, topology
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


def dealt(cores: list[Core], ranks: int, homes: list[int | None] | None = None) -> list[str | None]:
    everything = {cpu for core in cores for cpu in core.cpus}
    return shown(shares([everything] * ranks, homes or [None] * ranks, cores))


def shown(new: list[set[int] | None]) -> list[str | None]:
    return [None if cpus is None else spans(sorted(cpus)) for cpus in new]


def test_each_rank_gets_cores_of_one_numa_node() -> None:
    assert dealt(machine(2, 8), 4) == ["0-3", "4-7", "8-11", "12-15"]
    assert dealt(machine(2, 8), 2) == ["0-7", "8-15"]
    assert dealt(machine(4, 4), 2) == ["0-7", "8-15"]
    # 3 ranks of 5 cores on nodes of 8: one has to cross; one core is left over for the first
    assert dealt(machine(2, 8), 3) == ["0-5", "8-12", "6-7,13-15"]


def test_siblings_stay_together() -> None:
    assert dealt(machine(1, 4, siblings=2), 2) == ["0-1,4-5", "2-3,6-7"]
    assert dealt(machine(1, 4, siblings=2), 4) == ["0,4", "1,5", "2,6", "3,7"]


def test_no_rank_is_bound_where_there_are_fewer_cores_than_ranks() -> None:
    assert dealt(machine(1, 2, siblings=2), 3) == [None] * 3
    assert dealt(machine(1, 8), 1) == [None], "alone on its machine it keeps all"


def test_the_node_of_a_gpu_comes_first() -> None:
    assert dealt(machine(2, 4), 2, [1, 0]) == ["4-7", "0-3"]
    assert dealt(machine(2, 4), 4, [1, 1, 0, 0]) == ["4-5", "6-7", "0-1", "2-3"]
    assert dealt(machine(2, 4), 2, [None, 0]) == ["4-7", "0-3"]
    assert dealt(machine(2, 4), 4, [0, 0, 0, 0]) == ["0-1", "2-3", "4-5", "6-7"], "no more room: the next node"


def test_what_the_launcher_has_bound_stays() -> None:
    cores = machine(1, 8)
    assert shares([{0, 1}, {2, 3}], [None] * 2, cores) == [None, None]
    assert shares([{0, 1, 2, 3}, {0, 1, 2, 3}, {4, 5}], [None] * 3, cores) == [None] * 3
    mixed = shares([{0, 1}, set(range(8)), set(range(8))], [None] * 3, cores)
    assert shown(mixed) == [None, "2-4", "5-7"]
    allowed = shares([{2, 3, 4, 5}] * 2, [None] * 2, cores)
    assert shown(allowed) == ["2-3", "4-5"], "of a job that may use a part of the machine"


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
    """By the machine, not by their local ranks; a rank that its launcher has bound is not the one that knows the cores."""

    def report(machine: str, mask: list[int]) -> dict[str, object]:
        return {
            "machine": machine, "mask": mask, "home": None, "why_not": "",
            "cores": [[0, [cpu]] for cpu in mask],
        }  # fmt: skip

    answers = _share_out(
        [report(*one) for one in [("a", [0]), ("b", [0, 1]), ("a", [0, 1, 2]), ("b", [0, 1]), ("c", [0])]]
    )
    assert [answer["cpus"] for answer in answers] == [None, [0], [1, 2], [1], None]
    assert [answer["sharing"] for answer in answers] == [1] * 5
    assert [answer["said"] for answer in answers] == ["bound by the launcher"] * 4 + [""]
    crowd = _share_out([report("a", [0, 1])] * 3)
    assert all(answer["cpus"] is None and "3 ranks on 2 cores" in answer["said"] for answer in crowd)


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
