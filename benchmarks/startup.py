"""Measures the way to the first step: `hpctrain run -n N` beside torchrun with a bare DDP script of the same model.

    OMP_NUM_THREADS=1 python benchmarks/startup.py [--ranks 1,2,4] [--rounds N] [--json]

The two take turns. Prints medians: seconds until the first step is on the screen, processor seconds of all processes, and their
proportional memory (PSS: a page that several processes share counts once) per rank at its peak, from a run of its own, which is not
timed. Then hpctrain's share of torchrun's.

    OMP_NUM_THREADS=1 python benchmarks/startup.py --restart [--rounds N] [--json]

Kills one of 4 ranks and measures the time to the next step, with `[job] start = "fork"` and "spawn": until another rank has ended
(detect), until the ranks start again (stop), until the first line of the new ranks (start), and until the step (load).
"""

from __future__ import annotations

import argparse
import itertools
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
_POLL, _LOOK = 0.1, 0.005  # seconds
_KILLED_OF = 4
"""Ranks of a start in which one is killed."""


@dataclass(frozen=True)
class Row:
    """first_step: seconds. processor: seconds of all processes. memory: bytes per rank."""

    starter: str
    ranks: int
    first_step: float
    processor: float
    memory: float


@dataclass(frozen=True)
class Restart:
    """Seconds of a restart's parts; `whole` is their sum."""

    start: str
    detect: float
    stop: float
    begin: float
    load: float

    @property
    def whole(self) -> float:
        return self.detect + self.stop + self.begin + self.load


class Watched:
    """Runs a command; `memory` is the highest sum of its processes' proportional memory, `processor` their time."""

    def __init__(self, words: Sequence[str], directory: str, weighs: bool = False) -> None:
        """weighs: look for the memory, which takes time from the processes."""
        self.memory, self._weighs = 0, weighs
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
                family, is_over = [root, *root.children(recursive=True)], root.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return
            memory = 0
            for one in family:
                with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
                    spent = one.cpu_times()
                    self.times[one.pid] = spent.user + spent.system
                    if self._weighs:
                        memory += _proportional(one.pid)
            self.memory = max(self.memory, memory)
            if is_over:
                return
            time.sleep(_POLL)


def _proportional(pid: int) -> int:
    """A process's PSS in bytes."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def commands(ranks: int, output: str) -> list[tuple[str, list[str]]]:
    """The command of each starter."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "script.py"]
    ours = [str(Path(sys.executable).parent / "hpctrain"), "run", "job.toml", "-n", str(ranks)]
    return [("torchrun", torchrun), ("hpctrain", [*ours, "--set", f"job.output_dir={output}"])]


def measure(ranks: int, directory: str, rounds: int) -> list[Row]:
    """The medians of each starter."""
    found: dict[str, list[Watched]] = {}
    memory: dict[str, float] = {}
    for number in range(rounds):
        for name, words in commands(ranks, f"run-{ranks}-{number}"):
            found.setdefault(name, []).append(Watched(words, directory))
    for name, words in commands(ranks, f"run-{ranks}-weighed"):
        memory[name] = Watched(words, directory, weighs=True).memory / ranks
    return [
        Row(
            name,
            ranks,
            statistics.median(one.first_step for one in of_name),
            statistics.median(sum(one.times.values()) for one in of_name),
            memory[name],
        )
        for name, of_name in found.items()
    ]


def restart(start: str, directory: str, number: int) -> Restart:
    """Kill rank 1 of 4 when there are checkpoints."""
    output = f"restart-{start}-{number}"
    words = commands(_KILLED_OF, output)[1][1] + ["--restarts", "1"]
    for key in ("job.steps=100000", f"job.start={start}", "checkpoint.every_steps=1", "checkpoint.keep=1"):
        words += ["--set", key]
    process = subprocess.Popen(words, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    at: list[float] = []
    for line in process.stdout:
        now = time.perf_counter()
        if not at and line.startswith("step "):
            while not Path(directory, output, "checkpoints", "latest").exists():
                time.sleep(_POLL)
            ranks = psutil.Process(process.pid).children()
            at.append(time.perf_counter())
            ranks[1].kill()
            while all(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in (ranks[0], *ranks[2:])):
                time.sleep(_LOOK)
            at.append(time.perf_counter())
        elif (len(at) == 2 and line.startswith("starting ")) or len(at) == 3:
            at.append(now)
        elif len(at) == 4 and line.startswith("step "):
            at.append(now)
            process.terminate()
    process.wait()
    if len(at) < 5:
        raise SystemExit(f"{' '.join(words)} ended with {process.returncode} too early")
    return Restart(start, *(after - before for before, after in itertools.pairwise(at)))


def measure_restarts(directory: str, rounds: int) -> list[Restart]:
    """The medians of both ways to start, in turns."""
    found = [restart(start, directory, number) for number in range(rounds) for start in ("fork", "spawn")]
    rows = []
    for start in ("fork", "spawn"):
        mine = [one for one in found if one.start == start]
        parts = [statistics.median(getattr(one, key) for one in mine) for key in ("detect", "stop", "begin", "load")]
        rows.append(Restart(start, *parts))
    return rows


def show(rows: Sequence[Row]) -> None:
    """A line for each starter, and hpctrain's share of torchrun's."""
    for row in rows:
        print(
            f"{row.starter:9} {row.ranks:3} ranks  {row.first_step:6.2f} s  {row.processor:7.2f} s cpu  {row.memory / 1e6:5.0f} MB"
        )
    theirs, ours = rows
    shares = [getattr(ours, key) / getattr(theirs, key) for key in ("first_step", "processor", "memory")]
    print(f"{'share':9} {ours.ranks:3} ranks  {shares[0]:6.2f}    {shares[1]:7.2f}        {shares[2]:5.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4,8,16,32", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each number")
    parser.add_argument("--restart", action="store_true", help="measure a restart instead")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    arguments = parser.parse_args()
    rows: list[Row | Restart] = []
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "job.toml").write_text(JOB)
        Path(directory, "script.py").write_text(SCRIPT)
        if arguments.restart:
            rows += measure_restarts(directory, arguments.rounds)
            for one in rows if not arguments.json else ():
                assert isinstance(one, Restart)
                parts = f"detect {one.detect:.2f}  stop {one.stop:.2f}  start {one.begin:.2f}  load {one.load:.2f}"
                print(f"{one.start:6} {one.whole:6.2f} s: {parts}")
        for ranks in () if arguments.restart else map(int, arguments.ranks.split(",")):
            both = measure(ranks, directory, arguments.rounds)
            rows += both
            if not arguments.json:
                show(both)
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
