"""Measures the way to the first step: `hpctrain run -n N` beside torchrun with a bare DDP script of the same model.

    OMP_NUM_THREADS=1 python benchmarks/startup.py [--ranks 1,2,4] [--rounds N] [--json]

The two take turns. Prints medians: seconds until the first step is on the screen, processor seconds of all processes, and the peak
memory of a rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

JOB = """
[job]
name = "startup"
steps = 1
[model]
name = "gpt"
hidden_size = 128
layers = 2
attention_heads = 4
vocab_size = 256
max_seq_length = 64
[dataset]
name = "synthetic"
samples = 1000
[optimizer]
name = "adamw"
lr = 1e-3
[batch]
global_size = 32
micro_size = 1
[checkpoint]
every_steps = 0
"""
SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, "gelu", batch_first=True, norm_first=True)
model = nn.Sequential(nn.Embedding(256, 128), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(128, 256))
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(32 // dist.get_world_size()):
    tokens = torch.randint(256, (1, 64))
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
optimizer.step()
if dist.get_rank() == 0:
    print("step 1/1", flush=True)
dist.destroy_process_group()
"""
_POLL = 0.1  # seconds


@dataclass(frozen=True)
class Row:
    """first_step: seconds. processor: seconds of all processes. memory: the median rank's peak, bytes."""

    starter: str
    ranks: int
    first_step: float
    processor: float
    memory: float


class Watched:
    """Runs a command; `peaks` are the highest resident sizes of its descendants, `processor` their time."""

    def __init__(self, words: Sequence[str], directory: str) -> None:
        self.peaks: dict[int, int] = {}
        self.times: dict[int, float] = {}
        self.first_step = 0.0
        start = time.perf_counter()
        process = subprocess.Popen(words, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        watcher = threading.Thread(target=self._watch, args=(psutil.Process(process.pid),), daemon=True)
        watcher.start()
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 1/1  loss") or line == "step 1/1\n":
                self.first_step = time.perf_counter() - start
        if process.wait() or not self.first_step:
            raise SystemExit(f"{' '.join(words)} ended with {process.returncode}\n{''.join(lines)}")
        watcher.join()

    def _watch(self, root: psutil.Process) -> None:
        while True:
            try:
                family = [root, *root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            for one in family:
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                    spent = one.cpu_times()
                    self.times[one.pid] = spent.user + spent.system
                    self.peaks[one.pid] = max(self.peaks.get(one.pid, 0), one.memory_info().rss)
            if root.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(_POLL)


def measure(ranks: int, directory: str, number: int) -> list[Row]:
    """One round of both."""
    bin_ = Path(sys.executable).parent
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "script.py"]
    ours = [
        str(bin_ / "hpctrain"),
        "run",
        "job.toml",
        "-n",
        str(ranks),
        "--set",
        f"job.output_dir=run-{ranks}-{number}",
    ]
    rows = []
    for name, words in (("torchrun", torchrun), ("hpctrain", ours)):
        found = Watched(words, directory)
        of_ranks = sorted(found.peaks.values())[-ranks:]
        rows.append(Row(name, ranks, found.first_step, sum(found.times.values()), statistics.median(of_ranks)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4,8,16,32", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each number")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "job.toml").write_text(JOB)
        Path(directory, "script.py").write_text(SCRIPT)
        for ranks in map(int, arguments.ranks.split(",")):
            found = [row for number in range(arguments.rounds) for row in measure(ranks, directory, number)]
            for name in ("torchrun", "hpctrain"):
                mine = [row for row in found if row.starter == name]
                middle = [
                    statistics.median(getattr(row, key) for row in mine)
                    for key in ("first_step", "processor", "memory")
                ]
                rows.append(Row(name, ranks, *middle))
                if not arguments.json:
                    print(
                        f"{name:9} {ranks:3} ranks  {middle[0]:6.2f} s  {middle[1]:7.2f} s cpu  {middle[2] / 1e6:5.0f} MB",
                        flush=True,
                    )
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
