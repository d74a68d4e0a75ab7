"""Measures the planning of an HDF5 checkpoint with many ranks that hold rows of many tensors, without their values.

    python benchmarks/checkpoint_planner.py --ranks 512 --tensors 10000

Every rank holds its rows of every tensor (stage 3): nothing is replicated, so every piece is a separate chunk. One process
plays all ranks; each number is the cost of one rank.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import TypeVar

from hpctrain_plugins.checkpoint.hdf5 import manifest, plan, table, write
from hpctrain_plugins.checkpoint.hdf5.manifest import Manifest, Shard

from hpctrain.toolkit.checkpoint.rectangles import Rectangle
from hpctrain.toolkit.checkpoint.sealed import checksum_of
from hpctrain.toolkit.checkpoint.snapshot import collector_waits

T = TypeVar("T")
ROWS, COLUMNS = 4, 1024


def timed(what: str, action: Callable[[], T]) -> T:
    begin = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{what:58} {seconds:9.3f} s   (peak memory so far {peak:.1f} GB)", flush=True)
    return result


def offers_of(rank: int, names: list[str], ranks: int) -> list[plan.OfferedPiece]:
    part = Rectangle((rank * ROWS, 0), (ROWS, COLUMNS))
    return [plan.OfferedPiece(name, "float32", (ranks * ROWS, COLUMNS), part) for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=10_000)
    words = parser.parse_args()
    names = [f"optimizer/layers.{number}.mlp.up.weight/exp_avg" for number in range(words.tensors)]
    mine = offers_of(0, names, words.ranks)
    packed = timed("every rank, when shapes change: pack its offers", lambda: plan.pack(mine))
    print(f"{'every rank sends':58} {len(packed) / 1e6:9.3f} MB")
    everyone = [plan.pack(offers_of(rank, names, words.ranks)) for rank in range(words.ranks)]
    made = timed("rank 0, when shapes change: plan", lambda: plan.make_plan(everyone))
    with collector_waits():  # as a save does it
        tensors = timed("rank 0, when shapes change: what the manifest says of it", lambda: write.entries(made))
    places = [(name, 4096 + 16384 * number, ("0123456789abcdef",)) for number, name in enumerate(names)]
    own = timed(
        "every rank, every save: make its table", lambda: table.dump(2**20 + 16384 * len(names), "0" * 16, places)
    )
    print(f"{'a table':58} {len(own) / 1e6:9.1f} MB")
    shards = [Shard(f"shard-{rank:05d}.h5", checksum_of(own)) for rank in range(words.ranks)]
    raw = timed("rank 0, every save: make manifest.json", lambda: manifest.dump(Manifest(shards, tensors, {})))
    print(f"{'manifest.json':58} {len(raw) / 1e6:9.1f} MB")
    content = timed("every rank, at a restore: read and check manifest.json", lambda: manifest.parse(raw))
    timed("every rank, at a restore: read and check a table", lambda: table.parse(own, content, 0))


if __name__ == "__main__":
    main()
