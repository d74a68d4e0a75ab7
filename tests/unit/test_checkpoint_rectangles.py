"""Tilings and who writes what, without files."""

from __future__ import annotations

import pytest
import torch
from hpctrain_plugins.checkpoint.hdf5.plan import describe, make_plan, pack

from hpctrain.api import CheckpointError, Piece
from hpctrain.toolkit.checkpoint.rectangles import Rectangle, tiling_fault


def test_overlap_is_what_both_cover() -> None:
    one, other = Rectangle((0, 2), (4, 4)), Rectangle((3, 0), (4, 3))
    assert one.overlap(other) == Rectangle((3, 2), (1, 1))
    assert one.slices(Rectangle((3, 2), (1, 1))) == (slice(3, 4), slice(0, 1))
    assert one.overlap(Rectangle((4, 0), (1, 9))) is None
    assert Rectangle((), ()).overlap(Rectangle((), ())) == Rectangle((), ())


@pytest.mark.parametrize(
    ("rectangles", "fault"),
    [
        ([((0, 0), (4, 6))], None),
        ([((0, 0), (4, 2)), ((0, 2), (4, 4))], None),
        ([((0, 0), (1, 6)), ((1, 0), (3, 2)), ((1, 2), (3, 4))], None),
        ([((0, 0), (4, 2))], "hole"),
        ([], "hole"),
        ([((0, 0), (4, 4)), ((0, 3), (4, 3))], "overlap"),
        ([((0, 0), (4, 5)), ((2, 4), (2, 2))], "overlap"),  # the volume alone would not show it
        ([((1, 0), (4, 6))], "outside"),
        ([((0,), (4,))], "dims"),
    ],
)
def test_tilings(rectangles: list[tuple[tuple[int, ...], tuple[int, ...]]], fault: str | None) -> None:
    found = tiling_fault((4, 6), [Rectangle(*one) for one in rectangles])
    assert found is None if fault is None else found is not None and fault in found


@pytest.mark.timeout(20)
@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_rectangles_that_all_reach_far_take_no_time_to_check(axes: tuple[int, int]) -> None:
    count = 5000

    def turned(one: int, other: int) -> tuple[int, ...]:
        return tuple((one, other)[axis] for axis in axes)

    stairs = [Rectangle(turned(row, 0), turned(1, count - row)) for row in range(count)]
    stairs += [Rectangle(turned(1 + row, count - 1 - row), turned(count - 1 - row, 1)) for row in range(count - 1)]
    assert tiling_fault((count, count), stairs) is None
    assert "hole" in str(tiling_fault((count, count), stairs[1:]))
    assert "some overlap" in str(tiling_fault((count, count), [*stairs, stairs[0]]))


def test_a_tensor_cut_along_many_dims_is_refused_at_once() -> None:
    halves = [Rectangle((0,) * dim + (half,) + (0,) * (31 - dim), (1,) * 32) for dim in range(32) for half in (0, 1)]
    assert "cut along 32 dims, expected at most 8" in str(tiling_fault((2,) * 32, halves))


def offers(*pieces: Piece) -> bytes:
    return pack(describe(list(pieces)))


def test_replicas_are_spread_over_their_holders() -> None:
    pieces = [Piece.whole(f"w{index}", torch.empty(100)) for index in range(8)]
    plan = make_plan([offers(*pieces)] * 4)
    assert [len(mine) for mine in plan.offers] == [2, 2, 2, 2]
    assert sorted(offer.name for mine in plan.offers for offer in mine) == [piece.name for piece in pieces]


def test_replicas_fill_up_the_rank_that_has_less_of_its_own() -> None:
    own = [Piece("w", (100,), (0,), torch.empty(80)), Piece("w", (100,), (80,), torch.empty(20))]
    both = Piece.whole("b", torch.empty(30))
    plan = make_plan([offers(own[0], both), offers(own[1], both)])
    assert [[offer.name for offer in mine] for mine in plan.offers] == [["w"], ["w", "b"]]
    assert plan.indices == [[0], [0, 1]]


def test_pieces_without_elements_are_left_out_but_empty_tensors_are_kept() -> None:
    plan = make_plan(
        [
            offers(Piece("w", (2, 3), (0, 0), torch.empty(2, 3)), Piece.whole("empty", torch.empty(0, 3))),
            offers(Piece("w", (2, 3), (2, 0), torch.empty(0, 3)), Piece.whole("empty", torch.empty(0, 3))),
        ]
    )
    assert sorted(offer.name for mine in plan.offers for offer in mine) == ["empty", "w"]


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [
        (Piece("w", (4,), (0,), torch.empty(2)), Piece("w", (4,), (3,), torch.empty(1)), "hole"),
        (Piece("w", (4,), (0,), torch.empty(3)), Piece("w", (4,), (2,), torch.empty(2)), "overlap"),
        (Piece("w", (4,), (0,), torch.empty(4)), Piece("w", (5,), (0,), torch.empty(5)), "one full shape"),
        (Piece.whole("w", torch.empty(4)), Piece.whole("w", torch.empty(4).double()), "one dtype"),
        (Piece.whole("w", torch.empty(4)), Piece.whole("w/x", torch.empty(4)), "lies in the other"),
        (Piece.whole("w", torch.empty(4)), Piece.whole("a@0", torch.empty(4)), "'a@0'"),
        (Piece.whole("w", torch.empty(4)), Piece.whole("a//b", torch.empty(4)), "'a//b'"),
    ],
)
def test_contradictions_are_refused(one: Piece, other: Piece, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        make_plan([offers(one), offers(other)])


def test_a_dtype_without_a_place_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"layer\.w: dtype bits8"):
        describe([Piece.whole("layer.w", torch.empty(3, dtype=torch.bits8))])
