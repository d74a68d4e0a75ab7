"""kill -9 at any moment of a save: what is restored is whole, and never older than what was restored before."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hpctrain_plugins.checkpoint.hdf5 import Hdf5

from hpctrain.api import Piece, State
from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore, Restored
from hpctrain.ranks.signals import STOPPING

KILLS = 20


def pieces(value: int) -> list[Piece]:
    return [Piece.whole(f"model/{name}", torch.full((200, 500), float(value))) for name in ("a", "b", "c")]


def begin(root: Path) -> CheckpointStore:
    return CheckpointStore(root, Hdf5(None), [Hdf5(None)], dist.group.WORLD, Retention(2))


def restore(root: Path) -> Restored | None:
    target = pieces(-1)
    result = begin(root).restore(target)
    if result is not None:
        assert all((piece.tensor == result.step).all() for piece in target)
    return result


def save_for_ever(root: Path, ready: Connection) -> None:
    """Go on from what is there; every step is saved twice, so that replacing one is interrupted, too."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found, store = restore(root), begin(root)
    step = found.step if found else 0
    ready.send(step)
    while True:
        step += 1
        store.save(step, State(pieces(step)))
        ready.send(step)
        store.save(step, State(pieces(step)))


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.thorough
@pytest.mark.usefixtures("_alone")
def test_kill_9_never_leaves_a_torn_checkpoint_that_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    context = multiprocessing.get_context("forkserver")  # imports torch once for all the children
    # as for loader workers, which may come from this server later
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    context.set_forkserver_preload(["torch", "hpctrain.checkpoint.store", "hpctrain_plugins.checkpoint.hdf5"])
    chance, last, suffixes = random.Random(0), 0, set[str]()
    for _ in range(KILLS):
        here, there = context.Pipe()
        child = context.Process(target=save_for_ever, args=(tmp_path, there))
        child.start()
        assert here.poll(60) and here.recv() >= last
        begin_of_saves, saves = time.monotonic(), chance.randrange(3)
        for _ in range(saves):
            assert here.poll(60)
            last = here.recv()
        of_one = (time.monotonic() - begin_of_saves) / (2 * saves - 1) if saves else 0.02
        time.sleep(chance.uniform(0, 2 * of_one))  # a moment in the next two saves, on a busy machine, too
        child.kill()
        child.join(60)
        suffixes |= {path.suffix for path in tmp_path.iterdir()}
        found = restore(tmp_path)
        assert found is not None or last == 0
        assert found is None or found.step >= last
        last = found.step if found else last
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert last > 5  # it went on
    assert ".tmp" in suffixes  # and was interrupted while writing
    assert caplog.messages == []
