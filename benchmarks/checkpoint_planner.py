"""What planning an HDF5 checkpoint costs when many ranks hold rows of many tensors, without any of their values.

    python benchmarks/checkpoint_planner.py --ranks 512 --tensors 10000

Every rank holds its rows of every tensor (stage 3): nothing is replicated, so every piece is a chunk of its own. Plays all
ranks in one process; each number is what one rank spends.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import TypeVar

from hpctrain_plugins.checkpoint.common.collector import collector_waits
from hpctrain_plugins.checkpoint.common.rectangles import Rectangle
from hpctrain_plugins.checkpoint.hdf5 import dtypes, manifest, plan
from hpctrain_plugins.checkpoint.hdf5.manifest import Chunk, Entry, Manifest, ShardFile

T = TypeVar("T")
ROWS, COLUMNS = 4, 1024


def timed(what: str, action: Callable[[], T]) -> T:
    begin = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{what:58} {seconds:9.3f} s   (peak memory so far {peak:.1f} GB)", flush=True)
    return result


def offers_of(rank: int, names: list[str], ranks: int) -> list[plan.Offer]:
    part = Rectangle((rank * ROWS, 0), (ROWS, COLUMNS))
    return [plan.Offer(name, "float32", (ranks * ROWS, COLUMNS), part) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=10_000)
    words = parser.parse_args()
    names = [f"optimizer/layers.{number}.mlp.up.weight/exp_avg" for number in range(words.tensors)]
    mine = offers_of(0, names, words.ranks)
    packed = timed("every rank: pack its offers", lambda: plan.pack(mine))
    print(f"{'every rank sends':58} {len(packed) / 1e6:9.3f} MB")
    everyone = [plan.pack(offers_of(rank, names, words.ranks)) for rank in range(words.ranks)]
    made = timed("rank 0, when shapes change: plan", lambda: plan.make_plan(everyone))
    chunks: dict[str, list[Chunk]] = {name: [] for name in names}

    def gathered() -> Manifest:
        for rank, offers in enumerate(made.offers):
            for number, offer in enumerate(offers):
                chunks[offer.name].append(Chunk(rank, 4096 + 16384 * number, offer.part, ("0123456789abcdef",)))
        files = [
            ShardFile(f"shard-{rank:05d}.h5", 2**20 + 16384 * words.tensors, "0" * 16) for rank in range(words.ranks)
        ]
        dtype = dtypes.by_name("float32")
        tensors = {name: Entry(dtype, shape, tuple(chunks[name])) for name, (_, shape) in made.tensors.items()}
        return Manifest(files, tensors, {})

    with collector_waits():  # as a save does it
        content = timed("rank 0, every save: put the reports together", gathered)
        raw = timed("rank 0, every save: make manifest.json", lambda: manifest.dump(content))
    print(f"{'manifest.json':58} {len(raw) / 1e6:9.1f} MB")
    timed("every rank, at a restore: read and check manifest.json", lambda: manifest.parse(raw))


if __name__ == "__main__":
    main()
