"""The judgements of `hpctrain doctor` about more nodes than this machine can stand for."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hpctrain_tools.doctor.communication import RankPair, judge_links, judge_work, ring
from hpctrain_tools.doctor.findings import FindingOfRanks
from hpctrain_tools.doctor.node import judge_cores

NODES = ["a", "a", "b", "b", "c", "c", "d", "d"]


def problems(rows: list[FindingOfRanks]) -> list[FindingOfRanks]:
    return [row for row in rows if row.state != "ok"]


def links(slow: set[tuple[int, int]], bandwidth: float = 1e7, latency: float = 5e-5) -> list[RankPair]:
    """The ring of NODES; `slow` pairs with other numbers."""
    pairs = [pair for one_round in ring(len(NODES)) for pair in one_round]
    return [RankPair(pair, latency, bandwidth) if pair in slow else RankPair(pair, 2e-5, 1e9) for pair in sorted(pairs)]


def test_the_ring_is_linear_and_no_rank_is_in_two_pairs_of_a_round() -> None:
    assert ring(1) == [] and ring(2) == [[(0, 1)]]
    for size in (3, 4, 7, 64):
        rounds = ring(size)
        pairs = [pair for one_round in rounds for pair in one_round]
        assert len({frozenset(pair) for pair in pairs}) == len(pairs) == size and len(rounds) <= 3
        for one_round in rounds:
            ranks = [rank for pair in one_round for rank in pair]
            assert len(set(ranks)) == len(ranks)


def test_a_slow_node_is_named_where_all_its_links_are_slow() -> None:
    assert problems(judge_links(links(set()), NODES)) == []
    (row,) = problems(judge_links(links({(3, 4), (5, 6)}), NODES))
    assert row.ranks == (4, 5) and row.nodes == ("c",) and "all links of c are slow: 10.0 MB/s" in row.found
    assert "srun --exclude=c" in row.remedy


def test_a_slow_link_is_named_by_its_ends() -> None:
    (row,) = problems(judge_links(links({(3, 4)}), NODES))
    assert row.ranks == (3, 4) and row.nodes == ("b", "c") and "between rank 3 on b and rank 4 on c" in row.found
    (row,) = problems(judge_links(links({(2, 3)}), NODES))
    assert row.check == "links in nodes" and row.ranks == (2, 3)
    (row,) = problems(judge_links(links({(3, 4)}, bandwidth=1e9, latency=0.01), NODES))
    assert "10,000 us" in row.found


def test_a_network_that_is_slow_everywhere_is_slow() -> None:
    """No link is slower than the others."""
    between = {(1, 2), (3, 4), (5, 6), (7, 0)}
    rows = problems(judge_links(links(between), NODES))
    assert {node for row in rows for node in row.nodes} == set("abcd")


def test_slow_ranks_are_named() -> None:
    (row,) = problems(judge_work([10, 10, 10, 10, 10, 4, 10, 10], NODES))
    assert row.ranks == (5,) and row.nodes == ("c",)
    assert problems(judge_work([10, 6], ["a", "a"])) == []


def test_shared_cores_and_too_many_threads() -> None:
    def judged(*of_ranks: tuple[list[int], int]) -> list[FindingOfRanks]:
        facts = [{"cores": cores, "threads": threads, "by_hpctrain": False} for cores, threads in of_ranks]
        return problems(judge_cores(facts, ["a", "a", "b"][: len(of_ranks)]))

    assert judged(([0, 1], 2), ([2, 3], 2), ([0, 1], 2)) == []
    (row,) = judged(([0, 1, 2], 2), ([2, 3], 2), ([0, 1], 2))
    assert row.ranks == (0, 1) and "ranks share the CPUs 2" in row.found
    (row,) = judged(([0, 1], 4), ([2, 3], 4))
    assert "8 threads of 2 ranks: threads wait" in row.found


@pytest.mark.thorough
def test_a_stage_that_does_not_end_is_named_and_ends_the_process() -> None:
    """Another thread does it: a system call on a dead file server does not return."""
    code = (
        "import threading\n"
        "from hpctrain.contracts.identity import Identity\n"
        "from hpctrain.ranks.failure import limited\n"
        "from hpctrain.ranks.rank_channel import RankChannel\n"
        "with limited('the checks of /far', 0.2, RankChannel(), Identity(node='n1')):\n"
        "    threading.Event().wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "rank 0 on n1 did not finish the checks of /far within 0.2 s" in done.stderr, done
