"""Who gets which accelerator, and which communicator all take: nodes as launchers show them to ranks, faked by addresses."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.ranks.accelerators import Device, RankReport, decide, match


def candidate(name: str, on_accelerators: bool) -> Any:
    return SimpleNamespace(name=name, on_accelerators=on_accelerators)


AUTO = [candidate("accelerator", True), candidate("mpi", False), candidate("gloo", False)]
NONE = "there is no accelerator that torch can use"


def ranks(node: str, *seen: str, **more: Any) -> list[RankReport]:
    """The ranks of a node. seen: letters of the cards of each rank, in its order."""
    reports = []
    for letters in seen:
        cards = [f"{node}:{letter}" for letter in letters]
        lacks = {"accelerator": None if letters else NONE, "mpi": None, "gloo": None}
        kind = "H100" if letters else ""
        reports.append(RankReport(node, node, lacks | more.get("lacks", {}), cards, kind, more.get("trouble", "")))
    return reports


DEALT: dict[str, tuple[list[RankReport], list[int | None]]] = {
    "one rank, one card": (ranks("n", "a"), [0]),
    "torchrun or mpirun: all ranks see all cards": (ranks("n", "abcd", "abcd", "abcd", "abcd"), [0, 1, 2, 3]),
    "srun --gpus-per-task=1: each rank sees its own": (ranks("n", "a", "b", "c", "d"), [0, 0, 0, 0]),
    "--gpus-per-task=2": (ranks("n", "ab", "cd"), [0, 0]),
    "--gpu-bind=closest: half of the cards each": (
        ranks("n", "abcd", "abcd", "abcd", "abcd", "efgh", "efgh", "efgh", "efgh"), [0, 1, 2, 3, 0, 1, 2, 3],
    ),
    "rotated CUDA_VISIBLE_DEVICES": (ranks("n", "abcd", "bcda", "cdab", "dabc"), [0, 0, 0, 0]),
    "reversed on every other rank": (ranks("n", "ab", "ba"), [0, 0]),
    "more cards than ranks": (ranks("n", "abcdefgh", "abcdefgh"), [0, 1]),
    "one rank is shown the only card of another's choice": (ranks("n", "ab", "a"), [1, 0]),
    "a chain of displaced choices": (ranks("n", "abc", "ab", "a"), [2, 1, 0]),
    "two nodes": (ranks("n", "ab", "ab") + ranks("m", "ab", "ab"), [0, 1, 0, 1]),
    "nodes of different size": (ranks("n", "abcd", "abcd", "abcd", "abcd") + ranks("m", "a"), [0, 1, 2, 3, 0]),
    "8 cards, 8 ranks, two see one only": (ranks("n", *["abcdefgh"] * 6, "a", "b"), [2, 3, 4, 5, 6, 7, 0, 0]),
}  # fmt: skip


@pytest.mark.parametrize(("reports", "expected"), DEALT.values(), ids=DEALT)
def test_ranks_get_cards_of_their_own(reports: list[RankReport], expected: list[int | None]) -> None:
    chosen, accelerators, remark = decide("auto", AUTO, reports, "auto")
    assert chosen.name == "accelerator" and not remark
    held = [report.cards[at] for report, at in zip(reports, accelerators, strict=True) if at is not None]
    assert len(set(held)) == len(reports), held
    assert list(accelerators) == expected


KEYS = r'\(\[communicator\] device = "accelerator" refuses instead, "cpu" says nothing\)$'
ON_CPUS: dict[str, tuple[list[RankReport], str]] = {
    "nobody has a card": (ranks("n", "", ""), ""),
    "README's first command on a workstation": (
        ranks("n", "a", "a"),
        "the ranks compute on CPUs, and node n has 1 x H100: node n has 2 ranks and 1 accelerator that they see (",
    ),
    "two slices of one card (MIG has its address)": (
        [*ranks("n", "a"), *ranks("n", "a")], "node n has 2 ranks and 1 accelerator that they see",
    ),
    "8 ranks, 4 cards": (ranks("n", *["abcd"] * 8), "node n has 8 ranks and 4 accelerators that they see"),
    "enough cards, shown to the wrong ranks": (
        ranks("n", "ab", "ab", "ab", "c"), "node n has 4 ranks and 3 accelerators that they see",
    ),
    "a broken driver on one node": (
        ranks("n", "ab", "ab") + ranks("m", "", "", trouble="an NVIDIA GPU that this torch can't use"),
        f"the ranks compute on CPUs, and node n has 2 x H100: ranks 2-3 on m: {NONE} (",
    ),
    "a rank that is shown none": (ranks("n", "ab", ""), f"rank 1 on n: {NONE}"),
    "a torch for CPUs on a node with cards": (
        ranks("n", "", "", trouble="an NVIDIA GPU that this torch can't use (it has no CUDA)"),
        "the ranks compute on CPUs, and node n has an NVIDIA GPU that this torch can't use (it has no CUDA) (",
    ),
    "a torch without the vendor's library": (
        ranks("n", "ab", "ab", lacks={"accelerator": "this torch was built without nccl"}),
        "this torch was built without nccl",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("reports", "remark"), ON_CPUS.values(), ids=ON_CPUS)
def test_auto_computes_on_cpus_and_says_why(reports: list[RankReport], remark: str) -> None:
    """Once, for all ranks; `device = "accelerator"` refuses with the same reason, "cpu" is silent."""
    chosen, accelerators, found = decide("auto", AUTO, reports, "auto")
    assert chosen.name == "mpi" and set(accelerators) == {None}
    assert remark in found and bool(remark) == bool(found) == bool(re.search(KEYS, found)), found
    assert decide("auto", AUTO, reports, "cpu")[2] == ""
    with pytest.raises(EnvironmentUnfitError, match="device = 'accelerator': none fits"):
        decide("auto", AUTO, reports, "accelerator")


REFUSED: dict[str, tuple[str, list[Any], list[RankReport], Device, str]] = {
    "nccl with two ranks on one card": (
        "nccl", [candidate("nccl", True)], ranks("n", "a", "a", lacks={"nccl": None}), "auto",
        "none fits all ranks (nccl: node n has 2 ranks and 1 accelerator that they see",
    ),
    "nccl with a broken driver on one node": (
        "nccl", [candidate("nccl", True)],
        ranks("n", "ab", "ab", lacks={"nccl": None}) + ranks("m", "", "", lacks={"nccl": "there is no GPU that torch can use"}),
        "auto", "none fits all ranks (nccl: ranks 2-3 on m: there is no GPU that torch can use",
    ),
    "nccl where device is cpu": (
        "nccl", [candidate("nccl", True)], ranks("n", "a", lacks={"nccl": None}), "cpu",
        "none fits all ranks (nccl: [communicator] device is \"cpu\"",
    ),
    "mpi that one rank lacks": (
        "mpi", [candidate("mpi", False)], ranks("n", "", "") + ranks("m", "", lacks={"mpi": "no MPI"}), "auto",
        "none fits all ranks (mpi: rank 2 on m: no MPI",
    ),
    "nothing for all": (
        "auto", AUTO, ranks("n", "", lacks={"mpi": "no MPI", "gloo": "built without gloo"}), "auto",
        f"none fits all ranks (accelerator: {NONE}; mpi: no MPI; gloo: built without gloo)",
    ),
    "different vendors": (
        "accelerator", AUTO[:1],
        [*ranks("n", "a"), RankReport("m", "m", {"accelerator": None}, ["m:a"], "MI300")], "auto",
        "the ranks have different accelerators: H100, MI300",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "candidates", "reports", "device", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_asked_for_and_can_not_be_had_is_refused(
    asked: str, candidates: list[Any], reports: list[RankReport], device: Device, why: str
) -> None:
    with pytest.raises(EnvironmentUnfitError) as raised:
        decide(asked, candidates, reports, device)
    assert why in str(raised.value)


def test_a_communicator_for_cpus_warns_of_cards_and_device_picks_among_candidates() -> None:
    two = ranks("n", "ab", "ab")
    chosen, _, remark = decide("gloo", AUTO[2:], two, "auto")
    assert chosen.name == "gloo" and "2 x H100: gloo is for CPUs (" in remark
    assert decide("auto", AUTO, two, "cpu")[0].name == "mpi"
    assert decide("auto", AUTO[::-1], two, "accelerator")[0].name == "accelerator"


@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=6))
def test_no_two_ranks_get_one_card(seen: list[set[int]]) -> None:
    cards = [[str(one) for one in sorted(of_rank)] for of_rank in seen]
    found = match(cards)
    if found is None:
        assert len({frozenset(of_rank) for of_rank in seen}) > 1 or len(seen[0]) < len(seen)
    else:
        assert len({of_rank[at] for at, of_rank in zip(found, cards, strict=True)}) == len(seen)
