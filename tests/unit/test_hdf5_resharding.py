"""What was written under one tiling is read under any other, and no more is read than needed."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hpctrain_plugins.checkpoint.hdf5 import Hdf5, read, table
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpctrain.api import CheckpointError, Piece, State
from hpctrain.toolkit.checkpoint.rectangles import Rectangle

QUIET = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Rectangle]:
    """Cut again and again: not only grids come out."""
    whole = Rectangle((0,) * len(shape), shape)
    parts = [whole]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, part.shape[dim]))
        for begin, end in ((0, at), (at, part.shape[dim])):
            offsets, lengths = list(part.offsets), list(part.shape)
            offsets[dim] += begin
            lengths[dim] = end - begin
            parts.append(Rectangle(tuple(offsets), tuple(lengths)))
    return parts


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Rectangle], list[Rectangle]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    return shape, draw(tilings(shape)), draw(tilings(shape))


def pieces_of(tensor: torch.Tensor, parts: list[Rectangle]) -> list[Piece]:
    whole = Rectangle((0,) * tensor.dim(), tuple(tensor.shape))
    return [Piece("w", tuple(tensor.shape), part.offsets, tensor[whole.slices(part)]) for part in parts]


@QUIET
@given(case=cases(), block_bytes=st.sampled_from([1, 16, 64, 4 * 2**20]))
def test_any_tiling_is_read_under_any_other(
    case: tuple[tuple[int, ...], list[Rectangle], list[Rectangle]],
    block_bytes: int,
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, written, wanted = case
    monkeypatch.setattr(table, "BLOCK_BYTES", block_bytes)
    source = torch.randn(shape)
    with tempfile.TemporaryDirectory() as name:
        form = Hdf5()
        form.writer().write(State(pieces_of(source, written)), Path(name), group)
        target = torch.full(shape, float("nan"))
        form.load(Path(name), pieces_of(target, wanted))
    assert torch.equal(source, target)


def test_a_part_is_read_from_the_blocks_that_hold_it_and_no_others(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "BLOCK_BYTES", 1024)
    source = torch.randn(64, 32)  # rows of 128 bytes: 8 rows a block
    form = Hdf5()
    form.writer().write(
        State(pieces_of(source, [Rectangle((0, 0), (32, 32)), Rectangle((32, 0), (32, 32))])), tmp_path, group
    )
    sizes: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: sizes.append(real(fd, into, at)) or sizes[-1])
    target = torch.zeros(10, 32)
    form.load(tmp_path, [Piece("w", (64, 32), (7, 0), target)])
    assert torch.equal(target, source[7:17])
    assert sizes.count(1024) == 3  # rows 0-7, 8-15, 16-23
    others = [end - begin for begin, end in read.read_table(tmp_path, read.read_manifest(tmp_path), 0).holes]
    found = sizes[: len(others) + 3]
    assert sorted(size for size in found if size != 1024) == sorted(others)


def test_two_checkpoints_that_are_read_in_parts_and_in_turns_have_their_tables_parsed_twice_at_most(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, sources = Hdf5(), {tmp_path / name: torch.randn(64, 32) for name in "ab"}
    for directory, source in sources.items():
        directory.mkdir()
        form.writer().write(State([Piece.whole("w", source)]), directory, group)
    asked, manifests, real = list[Path](), list[Path](), read.read_manifest
    monkeypatch.setattr(read, "read_manifest", lambda one: manifests.append(one) or real(one))
    monkeypatch.setattr(read, "read_table", lambda *words, real=read.read_table: asked.append(words[0]) or real(*words))
    for row in range(8):
        for directory, source in sources.items():
            target = torch.zeros(1, 32)
            form.load(directory, [Piece("w", (64, 32), (row, 0), target)])
            assert torch.equal(target, source[row : row + 1])
    assert [manifests.count(one) for one in sources] == [1, 1] and [asked.count(one) for one in sources] == [2, 2]
    changed = next(iter(sources))
    (changed / "shard-00000.h5").write_bytes(b"")
    with pytest.raises(CheckpointError, match="it has 0 bytes"):
        form.load(changed, [Piece.whole("w", torch.zeros(64, 32))])


def test_another_shape_a_missing_name_and_a_rectangle_outside_are_named(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    form = Hdf5()
    form.writer().write(State([Piece.whole("w", torch.ones(4))]), tmp_path, group)
    for piece, says in [
        (Piece.whole("v", torch.ones(4)), "no tensor v"),
        (Piece.whole("w", torch.ones(5)), r"w has the shape \[4\], expected \[5\]"),
        (Piece("w", (4,), (2,), torch.ones(4)), "w has 2 of the 4 elements"),
    ]:
        with pytest.raises(CheckpointError, match=says):
            form.load(tmp_path, [piece])


def test_plan_and_layout_are_kept_while_shapes_stay_and_remade_when_they_change(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpctrain_plugins.checkpoint.hdf5 import write

    made = []
    real = write.make_template
    monkeypatch.setattr(write, "make_template", lambda offers: made.append(len(offers)) or real(offers))
    form = Hdf5()
    writer = form.writer()
    for step, rows in enumerate([3, 3, 5]):
        directory = tmp_path / str(step)
        directory.mkdir()
        source, target = torch.randn(rows, 2), torch.zeros(rows, 2)
        writer.write(State([Piece.whole("w", source)], {"step": step}), directory, group)
        form.load(directory, [Piece.whole("w", target)])
        assert torch.equal(source, target)
        assert form.read_values(directory) == {"step": step}
        assert form.verify(directory) == []
    assert made == [1, 1]


def test_a_system_without_files_in_memory_writes_the_same(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = State([Piece.whole("a/w", torch.randn(5, 3)), Piece.whole("b", torch.zeros(0))])
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        Hdf5().writer().write(state, tmp_path / name, group)
        monkeypatch.delattr(os, "memfd_create", raising=False)
    for file in ("shard-00000.h5", "shard-00000.json", "index.h5", "manifest.json"):
        assert (tmp_path / "with" / file).read_bytes() == (tmp_path / "without" / file).read_bytes()


@pytest.mark.thorough
def test_a_system_that_writes_less_than_it_was_asked_for_is_asked_again(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, chance = os.pwritev, random.Random(0)

    def short(fd: int, buffers: list[memoryview], at: int) -> int:
        joined = b"".join(buffers)
        return real(fd, [joined[: chance.randint(1, len(joined))]], at)

    monkeypatch.setattr(os, "pwritev", short)
    sources = {f"w{number}": torch.randn(number, 3) for number in range(1500)}  # more buffers than one call takes
    form = Hdf5()
    form.writer().write(State([Piece.whole(*item) for item in sources.items()]), tmp_path, group)
    loaded = {name: torch.zeros_like(source) for name, source in sources.items()}
    form.load(tmp_path, [Piece.whole(*item) for item in loaded.items()])
    assert all(torch.equal(loaded[name], source) for name, source in sources.items())
    assert form.verify(tmp_path) == []


def test_a_snapshot_that_is_taken_again_is_written_with_its_new_values(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    form, tensor = Hdf5(), torch.zeros(4, 3)
    writer = form.writer()
    strided = torch.zeros(6, 4).T
    for step in range(3):
        tensor.fill_(step)
        strided.fill_(-step)
        (tmp_path / str(step)).mkdir()
        taken = writer.snapshot(State([Piece.whole("w", tensor), Piece.whole("s", strided)], {"step": step}))
        tensor.fill_(99)
        writer.write(taken, tmp_path / str(step), group)
        w, s = torch.ones(4, 3), torch.ones(4, 6)
        form.load(tmp_path / str(step), [Piece.whole("w", w), Piece.whole("s", s)])
        assert (w == step).all() and (s == -step).all()
        assert form.verify(tmp_path / str(step)) == []
