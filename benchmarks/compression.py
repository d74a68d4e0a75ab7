"""Compares the compressions: the quickstart's loss and bytes with each of them, relative to none.

    OMP_NUM_THREADS=1 mpiexec -n 2 python benchmarks/compression.py [--steps N] [--kinds KIND ...]

A kind is a compression, optionally with options: "top-k ratio=0.01". Bytes are counted by
hpctrain.mpi from the first step to the last: rank 0's input to every collective, the loop's own
few included. An all-reduce counts all of its numbers, an all-gather the rank's own part. The best
algorithms send 2 (N - 1) / N and N - 1 times as much per rank: the last column. With two ranks
both factors are 1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import tomli
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import hpctrain.mpi
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain.ranks.detection import detect
from hpctrain.ranks.meeting import World
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.ranks.signals import StopRequest
from hpctrain.registry.hookspecs import hookimpl
from hpctrain.registry.life_cycle import LifeCycle
from hpctrain.training.assembly import assemble
from hpctrain.training.loop import train
from hpctrain.training.start import Start

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart.toml"
LAST = 20
KINDS = ["none", "top-k ratio=0.01", "powersgd rank=16"]


class Recorder:
    """Losses and bytes from the first step to the last."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    @hookimpl
    def hpctrain_job_start(self) -> None:
        self._before = hpctrain.mpi.statistics()

    @hookimpl
    def hpctrain_step_end(self, metrics: dict[str, Any]) -> None:
        self.losses.append(metrics["loss"])
        self._after = hpctrain.mpi.statistics()

    @property
    def put_in(self) -> int:
        return self._after.total.bytes - self._before.total.bytes

    def sent(self, ranks: int) -> float:
        """Bytes that the best algorithms send per rank."""
        factors = {"all_reduce": 2 * (ranks - 1) / ranks, "all_gather_into_tensor": ranks - 1}
        before = self._before.operations
        changes = {
            name: one.bytes - (before[name].bytes if name in before else 0)
            for name, one in self._after.operations.items()
        }
        unknown = {name for name, change in changes.items() if change} - factors.keys()
        assert not unknown, unknown
        return sum(factors[name] * change for name, change in changes.items() if change)


def train_with(kind: str, steps: int | None, output: str) -> Recorder:
    """Run the quickstart without evaluation, with only the final checkpoint."""
    name, *options = kind.split()
    tables: dict[str, Any] = tomli.loads(QUICKSTART.read_text())
    tables["job"] |= {"output_dir": output} | ({} if steps is None else {"steps": steps})
    del tables["evaluation"], tables["checkpoint"]
    if name != "none":
        tables["compression"] = {"name": name, **tomli.loads("\n".join(options))}
    checked = check(RawJob(tables, {}, str(QUICKSTART)), dist.get_world_size())
    recorder = Recorder()
    checked.registry.manager.register(recorder)
    hooks = LifeCycle(checked.registry, detect(), [])
    start = Start(detect(), RankChannel(), lambda: checked.raw, "never")
    start.world, start.checked = World(start.identity, HashStore(), start.channel), checked
    start.device, start.hooks = torch.device("cpu"), hooks
    session = assemble(start)
    try:
        train(session, StopRequest())
    finally:
        session.close()
    return recorder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="instead of the quickstart's")
    parser.add_argument("--kinds", nargs="+", default=KINDS, help="the others are compared with the first")
    parser.add_argument("--losses", type=Path, help="append each kind's losses to this file (JSON lines)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group(hpctrain.mpi.BACKEND, init_method="mpi://")
    ranks, rank = dist.get_world_size(), dist.get_rank()
    lines, first = [], None
    for kind in arguments.kinds:
        output = [tempfile.mkdtemp(prefix="compression-") if rank == 0 else ""]
        dist.broadcast_object_list(output)
        found = train_with(kind, arguments.steps, output[0])
        if rank == 0 and arguments.losses is not None:
            with arguments.losses.open("a") as file:
                file.write(json.dumps({"kind": kind, "losses": found.losses}) + "\n")
        loss = sum(found.losses[-LAST:]) / LAST
        first = first or (loss, found.put_in, found.sent(ranks))
        lines.append(
            f"{kind:40} loss {loss:.4f} ({loss / first[0] - 1:+.2%})  bytes put in {found.put_in:,} "
            f"({found.put_in / first[1]:.2%})  sent {found.sent(ranks) / first[2]:.2%}"
        )
    if rank == 0:
        print("\n".join(lines), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
