"""Kills saves at random moments and proves after each kill that the restored checkpoint is complete and not older.

    python benchmarks/checkpoint_kills.py --kills 100 --ranks 2 --who one

Ranks save without end (gloo over a file). This process kills one or all of them, and then restores. It prints counts and exits
with 1 at the first checkpoint that is torn, lost or older.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from hpctrain_plugins.checkpoint.hdf5 import Hdf5
from torch._C._distributed_c10d import FileStore, HashStore

from hpctrain.api import Piece, State
from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore, Restored

ROWS, COLUMNS = 240, 500
PATIENCE = 5.0
"""Seconds after which a rank whose neighbour was killed gives up."""


def pieces(value: float, ranks: int, rank: int) -> list[Piece]:
    """One tensor in rows over the ranks, one replicated, one on the last rank only."""
    step = ROWS // ranks
    found = [
        Piece("model/rows", (ROWS, COLUMNS), (rank * step, 0), torch.full((step, COLUMNS), value)),
        Piece.whole("model/all", torch.full((COLUMNS,), value)),
    ]
    return [*found, Piece.whole("model/last", torch.full((ROWS, COLUMNS), value))] if rank == ranks - 1 else found


def store_in(root: Path) -> CheckpointStore:
    """Keeps two."""
    group = dist.group.WORLD
    assert group is not None
    return CheckpointStore(root, Hdf5(None), [Hdf5(None)], group, Retention(2))


def restore(root: Path, ranks: int, rank: int) -> Restored | None:
    """The restored checkpoint. Every value must be the step's."""
    target = pieces(-1.0, ranks, rank)
    result = store_in(root).restore(target)
    assert result is None or all((piece.tensor == result.step).all() for piece in target), f"torn: {result}"
    return result


def save_for_ever(root: Path, meeting: str, ranks: int, rank: int, ready: Connection) -> None:
    """A rank: resumes from the newest checkpoint and saves each step twice, so that kills also interrupt a replacement."""
    store = FileStore(meeting, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=PATIENCE))
    found, saver = restore(root, ranks, rank), store_in(root)
    step = found.step if found else 0
    ready.send(step)
    try:
        while True:
            step += 1
            saver.save(step, State(pieces(float(step), ranks, rank)))
            saver.save(step, State(pieces(float(step), ranks, rank)))
    except Exception:  # its neighbour was killed: it leaves silently, as a job's ranks do
        sys.exit(1)


def kill_once(root: Path, ranks: int, who: str, longest: float, chance: random.Random) -> int:
    """Let the ranks save for a while, kill, and wait for the others to leave. Return the step that they began from."""
    context = multiprocessing.get_context("forkserver")  # imports torch once for all the children
    context.set_forkserver_preload(["torch", "hpctrain.checkpoint.store", "hpctrain_plugins.checkpoint.hdf5"])
    with tempfile.TemporaryDirectory() as meeting:
        here, there = context.Pipe()
        arguments = [(root, f"{meeting}/store", ranks, rank, there) for rank in range(ranks)]
        children = [context.Process(target=save_for_ever, args=one) for one in arguments]
        try:
            for child in children:
                child.start()
            begun = []
            for _ in children:
                if not here.poll(60):
                    raise AssertionError("the ranks did not begin to save")
                begun.append(int(here.recv()))
            time.sleep(chance.uniform(0, longest))
            for child in children if who == "all" else [chance.choice(children)]:
                child.kill()
            for child in children:
                child.join(6 * PATIENCE)
                assert child.exitcode is not None, "a rank hangs after its neighbour was killed"
        finally:
            for child in children:
                child.kill()
                child.join()
    assert len(set(begun)) == 1, f"the ranks began from different steps: {begun}"
    return begun[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--who", choices=("one", "all"), default="all")
    parser.add_argument("--longest", type=float, default=0.1, help="seconds from the first save to the kill")
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    chance, last, torn = random.Random(words.seed), 0, 0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for number in range(words.kills):
            begun = kill_once(root, words.ranks, words.who, words.longest, chance)
            torn += any(path.suffix == ".tmp" for path in root.iterdir())
            found = restore(root, 1, 0)
            step = found.step if found else 0
            if step < last or begun < last:
                print(f"kill {number + 1}: restored step {step} after {last}, ranks began from {begun}")
                return 1
            last = step
    who = "all ranks" if words.who == "all" else "one rank"
    print(
        f"{words.kills} kills of {who} of {words.ranks}: {torn} in the middle of a save, none torn or lost, step {last}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
