"""Checkpoints with any number of ranks: who writes what, resharding, and errors that all ranks see."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from math import prod
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
import torch.distributed as dist
from hpctrain_plugins.checkpoint.dcp import Dcp
from hpctrain_plugins.checkpoint.hdf5 import Hdf5, Hdf5Writer
from torch import Tensor
from training import own_device

from hpctrain.api import CheckpointError, CheckpointFormat, Piece, State
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.weights import load_weights
from hpctrain.toolkit.checkpoint.snapshot import Snapshots

pytestmark = pytest.mark.usefixtures("world")


def rank() -> int:
    return dist.get_rank()


def size() -> int:
    return dist.get_world_size()


def names(directory: Path) -> list[str]:
    """The content of the directory after rank 0 has tidied up, for which saves don't wait."""
    dist.barrier()
    found = sorted(path.name for path in directory.iterdir())
    dist.barrier()  # no rank may write the next checkpoint meanwhile
    return found


def whole() -> dict[str, Tensor]:
    """The state that all tilings cut, equal on all ranks: dims that no number of ranks divides, empty and 0-dim tensors."""
    generator = torch.Generator().manual_seed(5)
    return {
        "model/wide": torch.randn(7, 11, generator=generator).to(torch.bfloat16),
        "model/long": torch.randn(13, generator=generator),
        "model/one": torch.randn(1, 2, 3, generator=generator),
        "model/empty": torch.empty(0, 4),
        "optimizer/wide/step": torch.tensor(17.0),
        "optimizer/wide/exp_avg": torch.randn(7, 11, generator=generator),
    }


def cut(tensors: dict[str, Tensor], layout: str, ranks: int, mine: int) -> list[Piece]:
    """This rank's pieces, views of `tensors`: replicated, cut along a dim, in blocks, or by owner as in a pipeline."""
    pieces = []
    for number, (name, tensor) in enumerate(tensors.items()):
        if layout == "owner":
            if number % ranks == mine:
                pieces.append(Piece.whole(name, tensor))
            continue
        dims = {"replicated": [], "rows": [0], "columns": [1], "blocks": [0, 1], "rows of halves": [0]}[layout]
        ways = [ranks, 1] if ranks % 2 or layout != "blocks" else [ranks // 2, 2]
        if layout == "rows of halves":  # as in hybrid sharding: the other half of the ranks are replicas
            ways = [max(1, ranks // 2), 1]
        offsets, part = [0] * tensor.dim(), tensor
        places = [mine % ways[0], mine // ways[0] % ways[1]]
        for dim, way, place in zip(dims, ways, places, strict=False):
            if dim >= tensor.dim():
                continue
            step = -(-tensor.shape[dim] // way)  # as torch.chunk: the last parts are smaller or empty
            begin = min(place * step, tensor.shape[dim])
            offsets[dim] = begin
            part = part.narrow(dim, begin, min(step, tensor.shape[dim] - begin))
        pieces.append(Piece(name, tuple(tensor.shape), tuple(offsets), part))
    return pieces


LAYOUTS = ["replicated", "rows", "columns", "blocks", "rows of halves", "owner"]


def store(root: Path, **more: Any) -> CheckpointStore:
    return CheckpointStore(root, Hdf5(None), [Hdf5(None)], dist.group.WORLD, **more)


@pytest.mark.cases(default=["replicated-dcp", "rows-dcp", "rows of halves-dcp", "owner-dcp"], rest="nightly")
@pytest.mark.parametrize("form", [Hdf5(None), Dcp(None)], ids=lambda form: form.name)
@pytest.mark.parametrize("written", LAYOUTS)
def test_any_layout_is_read_in_any_other_at_any_number_of_ranks(
    written: str, form: CheckpointFormat, root: Path
) -> None:
    tensors = whole()
    one = CheckpointStore(root, form, [form], dist.group.WORLD)
    one.save(3, State(cut(tensors, written, size(), rank()), {"samples": rank()}))
    directory = root / "step-00000003"
    assert form.read_values(directory) == {"samples": 0, "step": 3}  # rank 0's
    for wanted in LAYOUTS:
        for ranks in (1, 2, 3, 4):
            loaded = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
            for place in range(ranks):  # all the places, so that each rank checks the whole
                form.load(directory, cut(loaded, wanted, ranks, place))
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    if rank() == 0:
        assert form.verify(directory) == []


def test_restore_fills_what_each_rank_holds(root: Path) -> None:
    tensors = whole()
    one = store(root)
    one.save(1, State(cut(tensors, "rows", size(), rank())))
    loaded = {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}
    for layout in ("owner", "columns"):
        pieces = cut(loaded, layout, size(), rank())
        result = store(root).restore(pieces)
        assert result is not None
        assert (result.step, result.path) == (1, root / "step-00000001")
        expected = cut(tensors, layout, size(), rank())
        assert all(torch.equal(mine.tensor, theirs.tensor) for mine, theirs in zip(pieces, expected, strict=True))


def test_replicas_are_written_once_and_by_all_ranks(root: Path) -> None:
    tensors = {f"model/{index}": torch.full((100,), float(index)) for index in range(4 * size())}
    path = store(root).save(1, State([Piece.whole(*one) for one in tensors.items()]))
    if rank() == 0:
        content = json.loads((path / "manifest.json").read_text())
        assert all(len(one["parts"]) == 1 for one in content["layouts"])
        for number in range(size()):
            with h5py.File(path / f"shard-{number:05d}.h5") as file:
                assert len(file["model"]) == 4
    dist.barrier()


def test_a_rank_with_nothing_to_write_makes_no_file(root: Path) -> None:
    pieces = [Piece.whole("model/w", torch.ones(3))] if rank() == size() - 1 else []
    path = store(root).save(1, State(pieces))
    shard = f"shard-{size() - 1:05d}"
    assert names(path) == ["index.h5", "manifest.json", f"{shard}.h5", f"{shard}.json"]


@pytest.mark.thorough
def test_a_changed_layout_on_one_rank_makes_all_plan_anew(root: Path) -> None:
    one, tensors = store(root), whole()
    layouts = ["rows", "rows", "columns", "owner", "owner"]
    for step, layout in enumerate(layouts):
        one.save(step, State(cut(tensors, layout, size(), rank())))
        if rank() == 0:
            assert Hdf5(None).verify(root / f"step-{step:08d}") == []
        for tensor in tensors.values():
            tensor += 1
    assert len(list(root.glob("step-*"))) == len(layouts)
    dist.barrier()


@pytest.mark.parametrize("form", [Hdf5(None), Dcp(None)], ids=lambda form: form.name)
def test_a_hole_on_one_rank_is_an_error_on_all(form: CheckpointFormat, root: Path) -> None:
    part = Piece("model/w", (size() + 1,), (rank(),), torch.ones(1))
    with pytest.raises(CheckpointError, match=r"model/w can't be saved: .*hole"):
        CheckpointStore(root, form, [form], dist.group.WORLD).save(1, State([part]))
    assert names(root) == []


def test_a_leaf_or_dtype_that_cannot_be_saved_is_an_error_on_all(root: Path) -> None:
    last = rank() == size() - 1
    tensor = torch.zeros(2, dtype=torch.bits8 if last else torch.float32)
    with pytest.raises(CheckpointError, match=r"model/w\d: dtype bits8"):
        store(root).save(1, State([Piece.whole(f"model/w{rank()}", tensor)]))
    with pytest.raises(TypeError, match=r"values\.x is a torch\.Tensor"):
        store(root).save(1, State([], {"x": torch.ones(1)}))
    assert names(root) == []


def test_a_write_that_fails_on_one_rank_is_told_on_all(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = whole()
    one = store(root)
    one.save(1, State(cut(tensors, "rows", size(), rank())))
    failing = size() - 1

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        if rank() == failing:
            patched.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match=rf"no space left .*shard-{failing:05d}\.h5 \(rank {failing}, node "):
            one.save(2, State(cut(tensors, "rows", size(), rank())))
    assert names(root) == ["latest", "step-00000001"]
    one.save(3, State(cut(tensors, "rows", size(), rank())))
    result = store(root).restore(cut(whole(), "columns", size(), rank()))
    assert result is not None
    assert result.step == 3


class OwnWriter(Hdf5Writer):
    """Like a third party's format: each rank writes its own file without asking the others."""

    def write(self, snapshot: State, directory: Path, group: dist.ProcessGroup) -> None:
        if rank() == size() - 1:
            raise OSError(28, "No space left on device")
        (directory / f"own-{rank()}").touch()


class Own(Hdf5):
    def writer(self) -> OwnWriter:
        return OwnWriter()


def test_a_format_whose_ranks_write_alone_fails_on_all_when_one_does(root: Path) -> None:
    one = CheckpointStore(root, Own(None), [], dist.group.WORLD)
    for step in (1, 2):
        with pytest.raises(OSError, match="No space left"):
            one.save(step, State([]))
        assert names(root) == []


@pytest.mark.parametrize("form", [Hdf5, Dcp])
def test_a_directory_that_a_rank_does_not_share_is_told(
    form: type[CheckpointFormat], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = size() - 1
    (tmp_path / "own").mkdir()
    monkeypatch.chdir(tmp_path / "own" if rank() == other > 0 else root)
    one = CheckpointStore(Path("checkpoints"), form(None), [], dist.group.WORLD)
    state = State([Piece.whole(f"model/{rank()}", torch.ones(3))])
    if other == 0:
        one.save(1, state)
        return
    with pytest.raises(CheckpointError, match=rf"rank {other} on node .* does not find checkpoints/step-00000001\.tmp"):
        one.save(1, state)
    assert names(root / "checkpoints") == [] and not list((tmp_path / "own").iterdir())


def test_a_damaged_shard_of_the_last_rank_lets_all_take_the_older_one(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, tensors = store(root), {f"model/{index}": torch.ones(50) for index in range(size())}
    pieces = [Piece.whole(*item) for item in tensors.items()][rank() : rank() + 1]
    one.save(1, State(pieces))
    one.save(2, State(pieces))
    shard = root / "step-00000002" / f"shard-{size() - 1:05d}.h5"
    if rank() == 0:
        shard.write_bytes(shard.read_bytes().replace(torch.ones(50).numpy().tobytes(), b"\1" * 200))
    dist.barrier()
    with caplog.at_level(logging.WARNING, "hpctrain"):
        result = one.restore(pieces)
    assert result is not None
    assert result.step == 1
    assert len(caplog.messages) == (1 if rank() == 0 else 0)
    assert f"{shard}: tensor model/{size() - 1} is corrupt" in caplog.text or rank() != 0
    with pytest.raises(CheckpointError, match=f"model/{size() - 1} is corrupt"):
        one.restore(pieces, root / "step-00000002")


def test_another_model_on_one_rank_is_refused_on_all(root: Path) -> None:
    one = store(root)
    pieces = [Piece.whole(f"model/{rank()}", torch.ones(3))]
    one.save(1, State(pieces))
    name = "model/other" if rank() == size() - 1 else f"model/{rank()}"
    with pytest.raises(CheckpointError, match=r"another model.*model/other isn't there"):
        one.restore([Piece.whole(name, torch.ones(3))])
    with pytest.raises(CheckpointError, match=f"model/{size() - 1} isn't in the model"):
        one.restore(pieces if rank() < size() - 1 else [])


def test_a_snapshot_has_the_values_of_its_moment() -> None:
    """From any device, whatever training does with the tensors at once; the next one reuses its memory."""
    shapes = [
        ((5, 7), torch.float32),
        ((), torch.float64),
        ((0, 3), torch.float32),
        ((33,), torch.bfloat16),
        ((2, 9), torch.int64),
    ]
    live = [torch.arange(prod(shape)).reshape(shape).to(own_device(), dtype) for shape, dtype in shapes]
    state = State([Piece(f"p{i}", tuple(one.shape), (0,) * one.dim(), one) for i, one in enumerate(live)], {"step": 3})
    snapshots, places = Snapshots(), []
    for number in range(2):
        expected = [one.cpu().clone() + number for one in live]
        for one in live:
            one += number
        made = snapshots.take(state)
        for one in live:
            one.zero_()
        for piece, wanted in zip(made.pieces, expected, strict=True):
            assert piece.tensor.device.type == "cpu" and torch.equal(piece.tensor, wanted)
        places.append([piece.tensor.data_ptr() for piece in made.pieces])
        for one, wanted in zip(live, expected, strict=True):
            one.copy_(wanted)
    assert places[0] == places[1]


def test_saves_in_the_background(root: Path) -> None:
    one, tensors = store(root, background_group=dist.new_group()), whole()
    for step in (1, 2):
        one.save_in_background(step, State(cut(tensors, "rows", size(), rank())))
        for tensor in tensors.values():  # training goes on, with collectives
            tensor.zero_()
            dist.all_reduce(tensor)
        tensors = whole()
    assert one.finish() == root / "step-00000002"
    for step in (1, 2):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        assert store(root).restore(cut(loaded, "replicated", size(), rank()), root / f"step-{step:08d}") is not None
        assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_full_disk_leaves_the_older_checkpoint_intact(root: Path) -> None:
    disk = root / "disk"
    mounted = [False]
    if rank() == 0:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
        mounted = [os.geteuid() == 0 and subprocess.run(command, check=False, timeout=30).returncode == 0]
    dist.broadcast_object_list(mounted, src=0)
    if not mounted[0]:
        pytest.skip("mounting a tmpfs needs root")
    try:
        one, pieces = store(disk), [Piece.whole(f"model/{rank()}", torch.ones(10))]
        one.save(1, State(pieces))
        with pytest.raises(OSError, match="no space left on device while writing"):
            one.save(2, State([Piece.whole(f"model/{rank()}", torch.ones(2**20))]))
        assert names(disk) == ["latest", "step-00000001"]
        result = one.restore(pieces)
        assert result is not None
        assert result.step == 1
    finally:
        dist.barrier()
        if rank() == 0:
            subprocess.run(["umount", str(disk)], check=True, timeout=30)


def test_weights_from_a_checkpoint_and_from_a_file(root: Path) -> None:
    tensors = whole()
    path = store(root).save(1, State(cut(tensors, "rows", size(), rank())))
    plain = {name.removeprefix("model/"): tensor for name, tensor in tensors.items() if name.startswith("model/")}
    if rank() == 0:
        torch.save(plain, root / "model.pt")
    dist.barrier()
    for source in (path, root / "model.pt"):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in plain.items()}
        load_weights(source, [Hdf5(None)], cut(loaded, "owner", size(), rank()), dist.group.WORLD)
        mine, expected = cut(loaded, "owner", size(), rank()), cut(plain, "owner", size(), rank())
        assert all(torch.equal(one.tensor, other.tensor) for one, other in zip(mine, expected, strict=True))
