"""The choice among checkpoints on one rank; tests/ranks has the same on several."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hpctrain_plugins.checkpoint.hdf5 import Hdf5, Hdf5Writer
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from hpctrain.api import CheckpointError, Piece, State, UsageError
from hpctrain.checkpoint.directory import CheckpointDirectory
from hpctrain.checkpoint.directory import step_of as step_in
from hpctrain.checkpoint.retention import Best, Retention
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.weights import load_weights


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """A world of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def store(
    root: Path, group: dist.ProcessGroup, keep: int | None = None, best: Best | None = None, **more: Any
) -> CheckpointStore:
    return CheckpointStore(root, Hdf5(None), [Hdf5(None)], group, Retention(keep, best=best), **more)


def state(step: int, rows: int = 4) -> State:
    return State([Piece.whole("model/w", torch.full((rows, 3), float(step)))], {"samples": step * 10})


def save(root: Path, group: dist.ProcessGroup, *steps: int, keep: int | None = None) -> None:
    one = store(root, group, keep)
    for step in steps:
        assert one.save(step, state(step)) == root / f"step-{step:08d}"


def restored(root: Path, group: dist.ProcessGroup, path: Path | None = None) -> tuple[int, Tensor] | None:
    target = torch.zeros(4, 3)
    result = store(root, group).restore([Piece.whole("model/w", target)], path)
    if result is None:
        return None
    assert target.unique().tolist() == [result.step]
    assert result.values == {"samples": result.step * 10, "step": result.step}
    return result.step, target


def step_of(root: Path, group: dist.ProcessGroup, path: Path | None = None) -> int | None:
    result = restored(root, group, path)
    return None if result is None else result[0]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def corrupt(directory: Path) -> None:
    shard = next(directory.glob("shard-*.h5"))
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)


def test_nothing_there_is_none(tmp_path: Path, group: dist.ProcessGroup) -> None:
    assert step_of(tmp_path / "checkpoints", group) is None


def test_the_newest_is_taken_and_latest_names_it(tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, 1, 2, 10)
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002", "step-00000010"]
    assert (tmp_path / "latest").read_text() == "step-00000010\n"
    assert step_of(tmp_path, group) == 10
    assert step_of(tmp_path, group, tmp_path / "step-00000002") == 2


def test_a_stale_or_wrong_latest_does_not_matter(tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, 1, 2)
    (tmp_path / "latest").write_text("step-00000001\n")
    assert step_of(tmp_path, group) == 2


def test_only_the_last_ones_are_kept(tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, 1, 2, 3, 4, keep=2)
    assert names(tmp_path) == ["latest", "step-00000003", "step-00000004"]


@pytest.mark.parametrize("name", ["shard-00000.h5", "shard-00000.json", "manifest.json"])
def test_a_damaged_newest_is_passed_over_with_one_warning(
    name: str, tmp_path: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, group, 1, 2)
    file = tmp_path / "step-00000002" / name
    raw = bytearray(file.read_bytes())
    raw[len(raw) - 20] ^= 1
    file.write_bytes(raw)
    with caplog.at_level(logging.WARNING, "hpctrain"):
        assert step_of(tmp_path, group) == 1
    assert len(caplog.messages) == 1
    assert str(file) in caplog.messages[0]


def test_the_warning_names_the_tensor(
    tmp_path: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, group, 1, 2)
    shard = tmp_path / "step-00000002" / "shard-00000.h5"
    shard.write_bytes(shard.read_bytes().replace(torch.full((3,), 2.0).numpy().tobytes(), b"\0" * 12))
    assert step_of(tmp_path, group) == 1
    assert "tensor model/w is corrupt" in caplog.text


@pytest.mark.parametrize("lost", ["manifest.json", "shard-00000.h5", "shard-00000.json", "everything"])
def test_an_incomplete_newest_is_passed_over(lost: str, tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, 1, 2)
    for file in (tmp_path / "step-00000002").iterdir():
        if lost in (file.name, "everything"):
            file.unlink()
    assert step_of(tmp_path, group) == 1


def test_a_torn_temporary_is_never_taken_and_goes_away(tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000002.tmp")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000000.del")
    assert step_of(tmp_path, group) == 1
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_links_and_files_in_place_of_directories_block_no_save(tmp_path: Path, group: dist.ProcessGroup) -> None:
    root, away = tmp_path / "checkpoints", tmp_path / "away"
    save(root, group, 1)
    (root / "step-00000001").rename(away)
    for name in ("step-00000001", "step-00000002", "step-00000000.del"):
        (root / name).symlink_to(away)
    (root / "step-00000004").symlink_to(tmp_path / "nowhere")
    for name in ("step-00000003.tmp", "step-00000004.tmp", "step-00000000.old"):
        (root / name).write_text("x")
    one = store(root, group, keep=1)
    for step in (2, 3, 4):
        (root / f"step-{step:08d}.tmp").write_text("x")
        one.save(step, state(step))
    assert names(root) == ["latest", "step-00000001", "step-00000004"]
    assert step_of(tmp_path, group, away) == 1  # the links in the way went, not what they led to


def test_what_a_crash_left_and_nobody_can_remove_is_told(
    tmp_path: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "step-00000008.tmp").mkdir()

    def fail(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", fail)
    save(tmp_path, group, 1)
    assert "step-00000008.tmp" in caplog.text and step_of(tmp_path, group) == 1


def test_all_bad_lists_every_reason(tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, 1, 2)
    corrupt(tmp_path / "step-00000001")
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)none of the.*step-00000002/manifest\.json.*step-00000001/shard"):
        step_of(tmp_path, group)


def test_what_the_system_does_not_let_in_is_passed_over_or_told(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, group, 1, 2)
    real = Hdf5.recognizes

    def refuse(form: Hdf5, directory: Path) -> bool:
        if directory.name == "step-00000002":
            raise PermissionError(13, "Permission denied", str(directory / "manifest.json"))
        return real(form, directory)

    monkeypatch.setattr(Hdf5, "recognizes", refuse)
    assert step_of(tmp_path, group) == 1
    assert f"skipped: Permission denied: {tmp_path}/step-00000002/manifest.json" in caplog.text
    with pytest.raises(CheckpointError, match="step-00000002 can't be used: Permission denied"):
        step_of(tmp_path, group, tmp_path / "step-00000002")
    long = Path("x" * 300)
    with pytest.raises(CheckpointError, match="x can't be accessed: File name too long"):
        step_of(tmp_path, group, long)
    with pytest.raises(CheckpointError, match=r"the weights in x+ can't be read: File name too long"):
        load_weights(long, [Hdf5(None)], [], group)


def test_an_explicit_path_is_taken_or_refused_but_never_replaced(tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, 1, 2)
    corrupt(tmp_path / "step-00000002")
    with pytest.raises(CheckpointError, match="step-00000002"):
        step_of(tmp_path, group, tmp_path / "step-00000002")
    with pytest.raises(UsageError, match="there is no checkpoint"):
        step_of(tmp_path, group, tmp_path / "step-00000003")
    with pytest.raises(CheckpointError, match=r"known format \(hdf5\); this run has .*step-00000002, "):
        step_of(tmp_path, group, tmp_path)
    (tmp_path / "step-00000001").rename(tmp_path / "best")
    assert step_of(tmp_path, group, tmp_path / "best") == 1


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([("model/w", 5)], r"model/w is \[4, 3\], expected \[5, 3\]"),
        ([("model/w", 4), ("model/v", 4)], "model/v isn't there"),
        ([], "model/w isn't in the model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_at_once(
    pieces: list[tuple[str, int]], says: str, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    store(tmp_path, group).save(1, State([Piece.whole(name, torch.ones(rows, 3)) for name, rows in pieces]))
    save(tmp_path, group, 2)
    with pytest.raises(CheckpointError, match=f"another model.*{says}"):
        store(tmp_path, group).restore([Piece.whole(name, torch.ones(rows, 3)) for name, rows in pieces])


def test_training_again_from_an_older_one_replaces_and_does_not_jump_ahead(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    save(tmp_path, group, 10, 20, 30)
    again = store(tmp_path, group)
    target = torch.zeros(4, 3)
    assert again.restore([Piece.whole("model/w", target)], tmp_path / "step-00000010") is not None
    again.save(20, State([Piece.whole("model/w", torch.full((4, 3), -1.0))]))
    result = store(tmp_path, group).restore([Piece.whole("model/w", target)])
    assert result is not None
    assert (result.step, target[0, 0].item()) == (20, -1)
    corrupt(tmp_path / "step-00000020")
    assert step_of(tmp_path, group) == 10  # and 30, of the training that was left, only after it
    again = store(tmp_path, group)
    assert again.restore([Piece.whole("model/w", target)]) is not None
    for step in (20, 30):
        again.save(step, state(step))
    assert step_of(tmp_path, group) == 30
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000020", "step-00000030"]


@pytest.mark.parametrize(("resumed", "then"), [(10, 10), (None, 30)])
def test_steps_between_where_it_began_and_its_first_save_were_left_behind(
    resumed: int | None, then: int, tmp_path: Path, group: dist.ProcessGroup
) -> None:
    save(tmp_path, group, 10, 20, 30)
    again = store(tmp_path, group)
    if resumed is not None:
        again.restore([Piece.whole("model/w", torch.zeros(4, 3))], tmp_path / f"step-{resumed:08d}")
    again.save(25, state(25))
    assert step_of(tmp_path, group) == 25
    corrupt(tmp_path / "step-00000025")
    assert step_of(tmp_path, group) == then


@pytest.mark.parametrize("best", [Best(1), None])
def test_best_names_no_checkpoint_that_is_gone(best: Best | None, tmp_path: Path, group: dist.ProcessGroup) -> None:
    """Training goes on before the only step that was evaluated, with keep_best or without."""
    one = store(tmp_path, group, 2, best=Best(1))
    one.save(10, state(10))
    one.save(20, State(state(20).pieces, {"evaluation_loss": 1.0}))
    assert (tmp_path / "best").read_text() == "step-00000020\n"
    again = store(tmp_path, group, 2, best=best)
    again.restore([Piece.whole("model/w", torch.zeros(4, 3))], tmp_path / "step-00000010")
    again.save(15, state(15))
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000015"]


def test_a_hint_that_is_no_text_is_no_obstacle(tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, 1, 2)
    (tmp_path / "abandoned").write_bytes(b"\xff\xfe\nstep-00000002\n")
    assert step_of(tmp_path, group) == 1
    save(tmp_path, group, 3)
    assert names(tmp_path) == ["abandoned", "latest", "step-00000001", "step-00000002", "step-00000003"]


def test_keep_prefers_the_new_training_to_the_one_that_was_left(tmp_path: Path, group: dist.ProcessGroup) -> None:
    save(tmp_path, group, 10, 20, 30)
    again = store(tmp_path, group, keep=2)
    again.restore([Piece.whole("model/w", torch.zeros(4, 3))], tmp_path / "step-00000010")
    again.save(15, state(15))
    assert names(tmp_path) == ["latest", "step-00000010", "step-00000015"]


LOSSES = st.sampled_from([math.nan, math.inf, 1.0, 1.0, 2.0])
SAVE = st.tuples(st.just("save"), st.integers(1, 4), LOSSES)
BEGIN = st.tuples(st.sampled_from(["newest", "anew", "fail"]), st.just(0), st.just(0.0))
BEGIN_AT = st.tuples(st.just("at"), st.integers(0, 9), st.just(0.0))


@settings(max_examples=40, deadline=None)
@given(
    keep=st.sampled_from([None, 1, 3]),
    every=st.sampled_from([None, 2, 5]),
    best=st.sampled_from([None, 1, 2]),
    events=st.lists(st.one_of(SAVE, SAVE, BEGIN, BEGIN_AT), max_size=25),
)
def test_what_stays_is_what_the_page_promises(
    keep: int | None, every: int | None, best: int | None, events: list[tuple[str, int, float]]
) -> None:
    """Over any saves, failed saves and new beginnings, by a model of docs/checkpoint-format.md."""
    with tempfile.TemporaryDirectory() as where, pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", lambda fd: None)
        root, there, left, own, began, step = Path(where), dict[int, float](), set[int](), set[int](), 0, 0

        def begin() -> tuple[CheckpointDirectory, Retention]:
            return CheckpointDirectory(root), Retention(keep, every, best and Best(best))

        def staying(candidates: Sequence[Path], abandoned: set[str]) -> tuple[set[Path], Path | None]:
            return retention.staying(lambda path: {"evaluation_loss": there[step_in(path)]}, candidates, abandoned)

        directory, retention = begin()
        for event, number, loss in events:
            order = sorted(there, key=lambda one: (one in left, -one))
            if event == "fail":
                directory.discard(directory.begin(step + 1))
            elif event != "save":
                chosen = {"newest": 0, "anew": len(order), "at": number}[event]
                began = step = order[chosen] if chosen < len(order) else 0
                own.clear()
                directory, retention = begin()
                directory.began = began
            else:
                step += number
                final = directory.commit(directory.begin(step))
                retention.saved(final, {"evaluation_loss": loss})
                directory.retain(staying, final)
                left |= {one for one in there if one > began and one not in own}
                left.discard(step)
                own.add(step)
                there[step] = loss
                order = sorted(there, key=lambda one: (one in left, -one))
                mine = [one for one in order if one not in left]
                evaluated = [one for one in mine if there[one] < math.inf]
                stay = set(order if keep is every is best is None else order[: keep or 1])
                stay |= {one for one in mine if every and one % every == 0}
                stay |= set(sorted(evaluated, key=lambda one: there[one])[: best or 0])
                there = {one: there[one] for one in there if one in stay}
                left &= stay
            expected = sorted(there, key=lambda one: (one in left, -one))
            assert [step_in(path) for path in directory.candidates()] == expected


def test_a_crash_while_replacing_leaves_the_old_or_the_new_one(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, group, 1)
    real = Path.rename

    def crash(path: Path, target: Path) -> Path:
        if path.suffix == ".tmp":
            raise KeyboardInterrupt  # no Exception: nothing is tidied up, as after kill -9
        return real(path, target)

    monkeypatch.setattr(Path, "rename", crash)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, group, 1)
    assert names(tmp_path) == ["abandoned", "latest", "step-00000001.old", "step-00000001.tmp"]
    monkeypatch.undo()
    assert step_of(tmp_path, group) == 1
    assert names(tmp_path) == ["abandoned", "latest", "step-00000001"]


@pytest.mark.parametrize("what", ["rename", "fsync", "unlink"])
def test_a_commit_that_fails_puts_the_old_one_back(
    what: str, tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, group, 1)
    real = getattr(os, what)

    def fail(path: Any, *more: Any, **options: Any) -> Any:
        name = Path(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path).name
        if name in ("step-00000001.tmp", "abandoned", tmp_path.name) and (tmp_path / "step-00000001.old").exists():
            monkeypatch.undo()  # once
            raise OSError(5, "Input/output error")
        return real(path, *more, **options)

    monkeypatch.setattr(os, what, fail)
    with pytest.raises(OSError, match="Input/output"):
        store(tmp_path, group).save(1, state(2))
    assert getattr(os, what) is real
    assert names(tmp_path) == ["abandoned", "latest", "step-00000001"]
    assert step_of(tmp_path, group) == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], check=False, timeout=30)
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs needs root")
    yield where
    subprocess.run(["umount", str(where)], check=True, timeout=30)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_full_disk_leaves_the_older_one_intact(small_disk: Path, group: dist.ProcessGroup) -> None:
    root = small_disk / "checkpoints"
    save(root, group, 1)
    one = store(root, group)
    large = State([Piece.whole("model/w", torch.zeros(2**20))])
    with pytest.raises(OSError, match=r"^no space left on device while writing .*step-00000002\.tmp/shard-00000\.h5"):
        one.save(2, large)
    assert names(root) == ["latest", "step-00000001"]
    assert step_of(root, group) == 1
    one.save(3, state(3))
    assert step_of(root, group) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_directory_that_becomes_read_only_leaves_the_older_one_intact(
    small_disk: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    save(small_disk, group, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=30)
    with pytest.raises(OSError, match=r"Read-only file system: .*step-00000002\.tmp"):
        save(small_disk, group, 2)
    assert step_of(small_disk, group) == 1
    assert names(small_disk) == ["latest", "step-00000001"]
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True, timeout=30)
    save(small_disk, group, 2)
    assert step_of(small_disk, group) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a tmpfs needs root")
def test_a_read_only_directory_with_a_torn_save_can_be_restored_from(
    small_disk: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    save(small_disk, group, 1)
    (small_disk / "step-00000002.tmp").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True, timeout=30)
    assert step_of(small_disk, group) == 1
    assert "step-00000002.tmp" in caplog.text


def test_a_background_save_holds_the_state_of_its_moment(tmp_path: Path, group: dist.ProcessGroup) -> None:
    one = store(tmp_path, group, background_group=dist.new_group())
    tensor = torch.ones(4, 3)
    for step in (1, 2):
        tensor.fill_(step)
        values = {"samples": step * 10}
        one.save_in_background(step, State([Piece.whole("model/w", tensor)], values))
        tensor.zero_()
        values.clear()
    assert one.finish() == tmp_path / "step-00000002"
    assert one.finish() is None
    assert [step_of(tmp_path, group, tmp_path / f"step-0000000{step}") for step in (1, 2)] == [1, 2]


def test_a_background_save_that_failed_is_told_at_the_next_wait(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = store(tmp_path, group, background_group=dist.new_group())
    began = threading.Event()

    def fail(*_: object) -> None:
        began.wait(10)
        raise OSError(28, "no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Hdf5Writer, "write", fail)
        one.save_in_background(1, state(1))
        began.set()
        with pytest.raises(OSError, match="no space left"):
            one.save(2, state(2))
    assert one.save(3, state(3)) == tmp_path / "step-00000003"
    assert names(tmp_path) == ["latest", "step-00000003"]


def weights() -> dict[str, Tensor]:
    return {"layer.weight": torch.arange(12.0).reshape(4, 3), "layer.scale": torch.tensor(2.0)}


def test_optional_tensors_may_be_missing_there_or_here(
    tmp_path: Path, group: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    weight = Piece.whole("model/w", torch.ones(3))
    store(tmp_path, group).save(
        1, State([weight, Piece.whole("memory/a", torch.ones(2)), Piece.whole("memory/b", torch.ones(2))])
    )
    kept, reshaped, new = torch.zeros(2), torch.zeros(5), torch.zeros(1)
    wanted = [weight, Piece.whole("memory/a", kept), Piece.whole("memory/b", reshaped), Piece.whole("memory/c", new)]
    restored = store(tmp_path, group).restore(wanted, optional=("memory/",))
    assert restored is not None and restored.absent == ["memory/b", "memory/c"]
    assert kept.tolist() == [1, 1] and not reshaped.any() and not new.any()
    assert "step-00000001 has tensors that this run doesn't use: memory (1)" in caplog.text
    restored = store(tmp_path, group).restore([weight], optional=("memory/",))
    assert restored is not None and not restored.absent
    assert "use: memory (2)" in caplog.text and len(caplog.messages) == 2
    with pytest.raises(CheckpointError, match="memory/a isn't in the model"):
        store(tmp_path, group).restore([weight])
    with pytest.raises(CheckpointError, match="model/v isn't there"):
        store(tmp_path, group).restore([weight, Piece.whole("model/v", torch.ones(1))], optional=("memory/",))


def test_a_damaged_one_leaves_nothing_in_tensors_that_the_older_one_lacks(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    weight, memory = torch.ones(3), torch.full((2,), 5.0)
    store(tmp_path, group).save(1, State([Piece.whole("model/w", weight)]))
    both = State([Piece.whole("memory/a", memory), Piece.whole("model/w", weight)])
    shard = store(tmp_path, group).save(2, both) / "shard-00000.h5"
    shard.write_bytes(shard.read_bytes().replace(memory.numpy().tobytes(), b"\x7e" * 8))
    target = torch.zeros(2)
    result = store(tmp_path, group).restore([Piece.whole("memory/a", target), both.pieces[1]], optional=("memory/",))
    assert result is not None and result.step == 1 and result.absent == ["memory/a"]
    assert not target.any()


@pytest.fixture(params=["safetensors", "torch", "torch legacy", "checkpoint"])
def weights_path(request: pytest.FixtureRequest, tmp_path: Path, group: dist.ProcessGroup) -> Path:
    if request.param == "checkpoint":
        pieces = [Piece.whole(f"model/{name}", tensor) for name, tensor in weights().items()]
        other = Piece.whole("optimizer/layer.weight/exp_avg", torch.ones(4, 3))
        return store(tmp_path, group).save(1, State([*pieces, other]))
    if request.param == "safetensors":
        save_file(weights(), tmp_path / "model.safetensors")
        return tmp_path / "model.safetensors"
    torch.save(weights(), tmp_path / "model.pt", _use_new_zipfile_serialization=request.param == "torch")
    return tmp_path / "model.pt"


def test_weights_fill_any_rectangle_of_any_dtype(weights_path: Path, group: dist.ProcessGroup) -> None:
    part, scale = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16)), torch.zeros(())
    pieces = [Piece("layer.weight", (4, 3), (1, 1), part), Piece.whole("layer.scale", scale)]
    load_weights(weights_path, [Hdf5(None)], pieces, group)
    assert part.tolist() == [[4, 5], [7, 8]]
    assert scale.item() == 2


def test_weights_of_tied_parameters_come_under_any_of_their_names(weights_path: Path, group: dist.ProcessGroup) -> None:
    """`torch.save(model.state_dict())` has both."""
    scale, tied = torch.zeros(()), torch.zeros(4, 3)
    pieces = [Piece.whole("layer.scale", scale), Piece.whole("first", tied)]
    load_weights(weights_path, [Hdf5(None)], pieces, group, [["first", "layer.weight"]])
    assert torch.equal(tied, weights()["layer.weight"])
    both = weights_path.with_name("both.pt")
    torch.save({**weights(), "first": weights()["layer.weight"]}, both)
    load_weights(both, [Hdf5(None)], pieces, group, [["first", "layer.weight"]])
    torch.save({**weights(), "first": torch.ones(4, 3)}, both)
    with pytest.raises(CheckpointError, match=r"first and layer.weight differ in the weights"):
        load_weights(both, [Hdf5(None)], pieces, group, [["first", "layer.weight"]])


def test_weights_in_several_safetensors_files(tmp_path: Path, group: dist.ProcessGroup) -> None:
    """As Hugging Face writes large models."""
    files = {"layer.weight": "model-00001-of-00002.safetensors", "layer.scale": "model-00002-of-00002.safetensors"}
    for name, file in files.items():
        save_file({name: weights()[name]}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 52}, "weight_map": files}))
    part, scale = torch.zeros(2, 3), torch.zeros(())
    pieces = [Piece("layer.weight", (4, 3), (2, 0), part), Piece.whole("layer.scale", scale)]
    for path in (index, tmp_path):
        part.zero_(), scale.zero_()
        load_weights(path, [Hdf5(None)], pieces, group)
        assert torch.equal(part, weights()["layer.weight"][2:]) and scale.item() == 2
    for crafted, says in [
        ({**files, "x": "../x.safetensors"}, "expected x in '../x.safetensors' beside it"),
        ({**files, "x": files["layer.scale"]}, "expected x in 'model-00002"),
        ([1], "no weight_map"), ({"x": 1}, "no weight_map"),
    ]:  # fmt: skip
        index.write_text(json.dumps({"weight_map": crafted}))
        with pytest.raises(CheckpointError, match=says):
            load_weights(index, [Hdf5(None)], pieces, group)


def test_weights_of_another_model_are_refused(weights_path: Path, group: dist.ProcessGroup) -> None:
    scale = Piece.whole("layer.scale", torch.zeros(()))
    for pieces, says in [
        ([scale], "layer.weight isn't in the model"),
        ([scale, Piece.whole("layer.weight", torch.zeros(4, 4))], r"layer.weight is \[4, 3\], expected \[4, 4\]"),
        ([scale, Piece.whole("layer.weight", torch.zeros(4, 3)), Piece.whole("x", torch.ones(1))], "x isn't there"),
    ]:
        with pytest.raises(CheckpointError, match=says):
            load_weights(weights_path, [Hdf5(None)], pieces, group)


def test_what_is_no_weights_is_refused_with_a_sentence(tmp_path: Path, group: dist.ProcessGroup) -> None:
    for name in ("a.safetensors", "b.pt"):
        (tmp_path / name).write_bytes(b"these are no weights")
        with pytest.raises(CheckpointError, match=name):
            load_weights(tmp_path / name, [Hdf5(None)], [], group)
    torch.save({"model": 3}, tmp_path / "nested.pt")
    with pytest.raises(CheckpointError, match=r"nested\.pt holds \['model'\], expected a state dict"):
        load_weights(tmp_path / "nested.pt", [Hdf5(None)], [], group)
    torch.save({"generator": weights(), "discriminator": weights()}, tmp_path / "two.pt")
    with pytest.raises(
        CheckpointError, match=r"holds several state dicts, 'generator', 'discriminator'; torch.save the one"
    ):
        load_weights(tmp_path / "two.pt", [Hdf5(None)], [], group)
    with pytest.raises(UsageError, match="no weights at"):
        load_weights(tmp_path / "nowhere", [Hdf5(None)], [], group)
    with pytest.raises(UsageError, match="known format"):
        load_weights(tmp_path, [Hdf5(None)], [], group)


NESTED: list[tuple[Callable[[dict[str, Tensor]], Any], list[str]]] = [
    (lambda state: {"epoch": 3, "state_dict": state, "optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}}, ["at 'state_dict'"]),
    (lambda state: {"model": state, "ema": state}, ["at 'model'"]),
    (lambda state: {"trainer": {"net": state, "step": 4}}, ["at 'trainer.net'"]),
    (lambda state: {f"module.{name}": value for name, value in state.items()}, ["'module.'"]),
    (
        lambda state: {"model": {f"_orig_mod.module.{name}": value for name, value in state.items()}},
        ["'model'", "'_orig_mod.'", "'module.'"],
    ),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(NESTED)))
def test_state_dicts_of_training_programs(tmp_path: Path, group: dist.ProcessGroup, number: int) -> None:
    nest, words = NESTED[number]
    torch.save(nest(weights()), tmp_path / "w.pt")
    pieces = [Piece.whole(name, torch.zeros_like(value)) for name, value in weights().items()]
    remarks = load_weights(tmp_path / "w.pt", [Hdf5(None)], pieces, group)
    assert len(remarks) == len(words) and all(word in said for word, said in zip(words, remarks, strict=True)), remarks
    assert all(torch.equal(piece.tensor, weights()[piece.name]) for piece in pieces)


def test_weights_that_fit_in_part(weights_path: Path, group: dist.ProcessGroup) -> None:
    """Tensors that the file lacks, or has in another shape, keep their values; the rest of the file is named."""
    scale, weight = Piece.whole("layer.scale", torch.zeros(())), Piece.whole("layer.weight", torch.zeros(4, 4))
    head = Piece.whole("head", torch.full((2,), 7.0))
    remarks = load_weights(weights_path, [Hdf5(None)], [scale, weight, head], group, strict=False)
    assert scale.tensor.item() == 2 and not weight.tensor.any() and head.tensor.tolist() == [7, 7]
    kept, unused = remarks
    assert kept.endswith("they keep their first values: head, layer.weight") and unused.endswith(
        "of no use to the model: layer.weight"
    )
    with pytest.raises(CheckpointError, match=r"have no tensor of the model: layer\."):
        load_weights(weights_path, [Hdf5(None)], [head], group, strict=False)


def test_a_flipped_bit_in_a_torch_file_is_found(tmp_path: Path, group: dist.ProcessGroup) -> None:
    path = tmp_path / "w.pt"
    torch.save(weights(), path)
    raw = bytearray(path.read_bytes())
    raw[raw.index(weights()["layer.weight"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(raw)
    pieces = [Piece.whole(name, torch.zeros_like(tensor)) for name, tensor in weights().items()]
    with pytest.raises(CheckpointError, match=r"w\.pt is corrupt: the CRC of .*data/0 is wrong"):
        load_weights(path, [Hdf5(None)], pieces, group)
    torch.save(weights(), path, _use_new_zipfile_serialization=False)
    load_weights(path, [Hdf5(None)], pieces, group)
    assert torch.equal(pieces[0].tensor, weights()["layer.weight"])


class Exploding:
    """Code in a crafted torch file, which free unpickling would run."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("exploded",))


def test_a_torch_file_runs_no_code(tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"layer.weight": Exploding()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil\.pt"):
        load_weights(tmp_path / "evil.pt", [Hdf5(None)], [], group)
    assert not (tmp_path / "exploded").exists()
