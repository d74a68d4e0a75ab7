"""Any layout in, any layout out: pieces as each way to be parallel makes them, at 1, 2, 3, 4 and 8 ranks."""

from __future__ import annotations

import hashlib
import itertools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hpctrain_plugins.checkpoint.dcp import Dcp
from hpctrain_plugins.checkpoint.hdf5 import Hdf5
from hypothesis import given, settings
from hypothesis import strategies as st
from test_hdf5_resharding import tilings
from threaded import on_ranks
from torch import Tensor

from hpctrain.api import CheckpointFormat, Piece, State
from hpctrain.toolkit.checkpoint.rectangles import Rectangle

RANKS = (1, 2, 3, 4, 8)
FORMATS: list[type[CheckpointFormat]] = [Hdf5, Dcp]
Tensors = dict[str, Tensor]
Layout = Callable[[Tensors, int, int], list[Piece]]


def model(seed: int) -> Tensors:
    """Two blocks and an embedding with their optimizer state; no dim is divided by 2, 3, 4 and 8 alike."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {"model/embedding": draw(11, 6).to(torch.bfloat16), "model/norm": draw(6)}
    for block in range(2):
        tensors |= {
            f"model/blocks.{block}.up": draw(9, 6),
            f"model/blocks.{block}.down": draw(6, 9),
            f"model/blocks.{block}.bias": draw(9),
            f"model/blocks.{block}.odd": draw(1, 2, 3),
        }
    state = {f"optimizer/{name.removeprefix('model/')}/exp_avg": draw(*one.shape) for name, one in tensors.items()}
    steps = {f"optimizer/{name.removeprefix('model/')}/step": torch.tensor(float(seed)) for name in tensors}
    return {**tensors, **state, **steps, "model/empty": torch.empty(0, 4)}


def cut(name: str, tensor: Tensor, dim: int, ways: int, place: int, within: Piece | None = None) -> Piece:
    """A piece as torch.chunk cuts it: the last ranks have less, or nothing."""
    whole = within or Piece.whole(name, tensor)
    if dim >= whole.tensor.dim() or ways == 1:
        return whole
    length = whole.tensor.shape[dim]
    step = math.ceil(length / ways)
    begin = min(place * step, length)
    offsets = list(whole.offsets)
    offsets[dim] += begin
    return Piece(name, whole.shape, tuple(offsets), whole.tensor.narrow(dim, begin, min(step, length - begin)))


def pair(ranks: int) -> int:
    """The size of the inner axis of a mesh of two."""
    return 2 if ranks % 2 == 0 else 1


def replicated(tensors: Tensors, ranks: int, rank: int) -> list[Piece]:
    """Stage 0, and context parallelism, too."""
    return [Piece.whole(*item) for item in tensors.items()]


def stage_1(tensors: Tensors, ranks: int, rank: int) -> list[Piece]:
    """Parameters on all ranks, optimizer state in rows."""
    return [
        cut(*item, 0, ranks, rank) if item[0].startswith("optimizer/") else Piece.whole(*item)
        for item in tensors.items()
    ]


def stage_3(tensors: Tensors, ranks: int, rank: int) -> list[Piece]:
    return [cut(*item, 0, ranks, rank) for item in tensors.items()]


def hybrid(tensors: Tensors, ranks: int, rank: int) -> list[Piece]:
    """HSDP: rows within a group, groups are replicas."""
    inner = ranks // pair(ranks)
    return [cut(*item, 0, inner, rank % inner) for item in tensors.items()]


def tensor_dim(name: str) -> int:
    """Column-wise, row-wise, or outside the plan."""
    return 0 if ".up" in name or ".bias" in name else 1 if ".down" in name else 99


def tensor_parallel(tensors: Tensors, ranks: int, rank: int) -> list[Piece]:
    return [cut(name, one, tensor_dim(name), ranks, rank) for name, one in tensors.items()]


def pipeline(tensors: Tensors, ranks: int, rank: int) -> list[Piece]:
    """Each tensor on one rank only."""
    return [Piece.whole(*item) for place, item in enumerate(tensors.items()) if place % ranks == rank]


def two_dims(tensors: Tensors, ranks: int, rank: int) -> list[Piece]:
    """FSDP x TP; parameters outside the TP plan are in rows over the data axis and replicated over the other."""
    tp = pair(ranks)
    pieces = [cut(name, one, tensor_dim(name), tp, rank % tp) for name, one in tensors.items()]
    return [cut(one.name, one.tensor, 0, ranks // tp, rank // tp, one) for one in pieces]


def four_dims(tensors: Tensors, ranks: int, rank: int) -> list[Piece]:
    """Pipeline x replicas x rows x TP, as many of them as the ranks allow."""
    sizes = {1: (1, 1, 1, 1), 2: (2, 1, 1, 1), 3: (1, 1, 3, 1), 4: (2, 1, 1, 2), 8: (2, 1, 2, 2)}[ranks]
    pp, _, rows, tp = (rank // math.prod(sizes[i + 1 :]) % sizes[i] for i in range(4))
    mine = {name: one for place, (name, one) in enumerate(tensors.items()) if place % sizes[0] == pp}
    pieces = [cut(name, one, tensor_dim(name), sizes[3], tp) for name, one in mine.items()]
    return [cut(one.name, one.tensor, 0, sizes[2], rows, one) for one in pieces]


def uneven(tensors: Tensors, ranks: int, rank: int) -> list[Piece]:
    """Flat buckets cut at rows: the last rank holds most."""
    pieces = []
    for name, one in tensors.items():
        if not one.dim():
            pieces.append(Piece.whole(name, one))
            continue
        begin, end = min(rank, len(one)), len(one) if rank == ranks - 1 else min(rank + 1, len(one))
        pieces.append(Piece(name, tuple(one.shape), (begin, *(0,) * (one.dim() - 1)), one[begin:end]))
    return pieces


LAYOUTS: dict[str, Layout] = {
    one.__name__: one
    for one in (replicated, stage_1, stage_3, hybrid, tensor_parallel, pipeline, two_dims, four_dims, uneven)
}


def digests(tensors: Tensors) -> dict[str, str]:
    return {
        name: hashlib.sha256(one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, one in tensors.items()
    }


def read_into(form: CheckpointFormat, directory: Path, layout: Layout, ranks: int) -> Tensors:
    """What all ranks of a layout hold together, after each filled its own differently seeded tensors."""
    source = model(1)
    seen = {name: torch.full_like(one, float("nan")) for name, one in source.items()}
    for rank in range(ranks):
        own = model(2 + rank)
        pieces = layout(own, ranks, rank)
        form.load(directory, pieces)
        for piece in pieces:
            whole = Rectangle((0,) * len(piece.shape), piece.shape)
            where = whole.slices(Rectangle(piece.offsets, tuple(piece.tensor.shape)))
            assert torch.equal(piece.tensor, source[piece.name][where])  # each replica, not only the last one
            seen[piece.name][where] = piece.tensor
    return seen


@pytest.mark.cases(thorough=["pipeline-dcp", "four_dims-hdf5"], rest="nightly")
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("written", LAYOUTS)
def test_every_layout_loads_into_every_other(written: str, form: type[CheckpointFormat], tmp_path: Path) -> None:
    tensors = model(1)
    expected, others = digests(tensors), itertools.cycle(RANKS)
    for ranks in RANKS if form is Hdf5 else (3, 8):
        directory = tmp_path / str(ranks)
        directory.mkdir()
        on_ranks(
            ranks,
            lambda rank, group, ranks=ranks, to=directory: (
                form({}).writer().write(State(LAYOUTS[written](tensors, ranks, rank), {"step": 1}), to, group)
            ),
        )
        for layout in LAYOUTS.values():
            assert digests(read_into(form({}), directory, layout, next(others))) == expected
    assert form({}).verify(directory) == []


@st.composite
def random_layouts(draw: st.DrawFn) -> tuple[int, dict[str, tuple[tuple[int, ...], list[tuple[Rectangle, list[int]]]]]]:
    """Ranks, and for each tensor a shape and rectangles that tile it, each with the ranks that hold it."""
    ranks = draw(st.sampled_from(RANKS))
    tensors = {}
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
        parts = draw(tilings(shape))
        holders = st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True)
        tensors[f"w{number}"] = (shape, [(part, draw(holders)) for part in parts])
    return ranks, tensors


@pytest.mark.thorough
@settings(max_examples=40)
@given(layout=random_layouts(), form=st.sampled_from(FORMATS))
def test_any_rectangles_on_any_ranks(
    layout: tuple[int, dict[str, tuple[tuple[int, ...], list[tuple[Rectangle, list[int]]]]]],
    form: type[CheckpointFormat],
) -> None:
    ranks, tensors = layout
    source = {name: torch.randn(shape) for name, (shape, _) in tensors.items()}

    def mine(rank: int) -> list[Piece]:
        return [
            Piece(name, shape, part.offsets, source[name][Rectangle((0,) * len(shape), shape).slices(part)])
            for name, (shape, parts) in tensors.items()
            for part, holders in parts
            if rank in holders
        ]

    with tempfile.TemporaryDirectory() as directory:
        on_ranks(ranks, lambda rank, group: form({}).writer().write(State(mine(rank)), Path(directory), group))
        target = {name: torch.full_like(one, float("nan")) for name, one in source.items()}
        form({}).load(Path(directory), [Piece.whole(*item) for item in target.items()])
    assert digests(target) == digests(source)
