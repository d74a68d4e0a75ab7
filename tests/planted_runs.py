"""Directories of runs as hpctrain writes them, for stories that a CPU cannot tell."""

from __future__ import annotations

import json
import math
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import tomli_w

BEGIN = 1_790_000_000.0
"""The first start."""
COMPUTING = {"forward": 0.2, "backward": 0.4, "optimizer": 0.05, "other": 0.02}
GB = 1_000_000_000


def clock(time: float, hours: int = 0) -> datetime:
    return datetime.fromtimestamp(time, timezone(timedelta(hours=hours)))


class Planted:
    """A run of 16 ranks on two hosts, told step by step."""

    def __init__(self, directory: Path, steps: int = 200, **tables: dict[str, Any]) -> None:
        self.directory, self.steps, self.now, self.step = directory, steps, BEGIN, 0
        self.hours = 0
        """Of the clock, before UTC."""
        self.mesh = "dp_shard 4 x tp 4"
        (directory / "log").mkdir(parents=True)
        job: dict[str, dict[str, Any]] = {
            "job": {"name": directory.name, "steps": steps, "output_dir": str(directory)},
            "batch": {"micro_size": 8, "global_size": 256}, "optimizer": {"lr": 0.001}, "checkpoint": {"every_steps": 50},
            "compression": {"name": "none"}, "activation_checkpointing": {"mode": "none"}, "parallelism": {"tensor": {"size": 4}},
        }  # fmt: skip
        for name, table in tables.items():
            job.setdefault(name, {}).update(table)
        (directory / "job.resolved.toml").write_text(tomli_w.dumps(job))

    def _append(self, name: str, line: str) -> None:
        with (self.directory / name).open("a") as file:
            file.write(line + "\n")

    def says(self, text: str, level: str = "INFO", rank: int = 0) -> Planted:
        """A line of a rank's log."""
        moment = clock(self.now, self.hours)
        stamp = f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d}{moment:%z}"
        self._append(f"log/rank-{rank:05d}.log", f"{stamp} {level} {text}")
        return self

    def long_ago(self) -> Planted:
        """Its files were written before: nobody takes it for a running one."""
        for path in self.directory.rglob("*"):
            os.utime(path, (BEGIN, BEGIN))
        return self

    def starts(self, seconds: float = 20.0, **more: Any) -> Planted:
        """A start that takes so long."""
        row = {
            "time": clock(self.now).isoformat(timespec="milliseconds"), "command": "hpctrain run job.toml", "directory": "/work",
            "ranks": 16, "hosts": ["node1", "node2"], "ranks_of_hosts": [8, 8], "launcher": "mpi",
            "versions": {"hpctrain": "0.1.0", "torch": "2.13.0"}, "plugins": ["hpctrain 0.1.0"], "git": None,
            "device": "NVIDIA H100 80GB HBM3", "device_bytes": 80 * GB, **more,
        }  # fmt: skip
        self._append("starts.jsonl", json.dumps(row))
        self.says(f"rank 0 of {row['ranks']} on node1 (mpi)").says(f"mesh         {self.mesh}; sharding zero-2")
        self.now += seconds
        return self

    def trains(
        self, steps: int, memory: float = 60 * GB, more: dict[str, Any] | None = None, **parts: float
    ) -> Planted:
        """Rows of so many steps. parts: seconds besides computing."""
        seconds = {**COMPUTING, "data": 0.01, "communication": 0.03, "checkpoint": 0.0, "evaluation": 0.0, **parts}
        for _ in range(steps):
            self.step, self.now = self.step + 1, self.now + sum(seconds.values())
            row = {
                "step": self.step, "epoch": self.step / 1000, "time": self.now, "loss": 2 + 3 * math.exp(-self.step / 60),
                "lr": 0.001, "grad_norm": 1.0, "tokens": 262_144, "step_seconds": sum(seconds.values()),
                "tokens_per_second": 262_144 / (sum(seconds.values()) or 1.0), "seconds": seconds, "mfu": 0.42,
                "memory_bytes": {"rank_max": memory, "rank_mean": 0.9 * memory},
                "exposed_seconds": {"tp.all_reduce": seconds["communication"] * 0.7, "dp_shard.reduce_scatter": 0.006},
                "hidden_seconds": {"dp_shard.reduce_scatter": 0.1},
                "bytes_per_second": {"tp.all_reduce": 2e11, "dp_shard.reduce_scatter": 4e10}, **(more or {}),
            }  # fmt: skip
            self._append("metrics.jsonl", json.dumps(row))
        return self.says(f"step {self.step}/{self.steps}  loss 2.1000")

    def saves(self) -> Planted:
        """A checkpoint of the newest step."""
        (self.directory / "checkpoints" / f"step-{self.step:08d}").mkdir(parents=True)
        return self

    def evaluates(self, loss: float = 2.2) -> Planted:
        row = {"step": self.step, "epoch": 1.0, "time": self.now, "evaluation_loss": loss, "evaluation_tokens": 100}
        self._append("metrics.jsonl", json.dumps(row))
        return self

    def ends(self) -> Planted:
        """As a run that has reached its last step."""
        return self.says(f"done         step {self.step}, loss 2.1000, 99 s")

    def resumes(self, seconds_later: float) -> Planted:
        """A start after the newest checkpoint, which drops the rows behind it."""
        path = self.directory / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        back = max(int(one.name[5:]) for one in (self.directory / "checkpoints").iterdir())
        lost = [row for row in rows if row["step"] > back]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows if row["step"] <= back))
        self.now += seconds_later
        self.starts(20.0)
        note = {
            "time": clock(self.now - 5).isoformat(), "back_to_step": back, "lost_steps": len(lost),
            "lost_seconds": sum(sum(row["seconds"].values()) for row in lost),
        }  # fmt: skip
        self._append("starts.jsonl", json.dumps(note))
        self.step = back
        return self


def planted_plan(*most: int, **keys: Any) -> dict[str, Any]:
    """What `hpctrain plan --json` says of the ranks of a planted run, for parts of the model that need so many bytes in a step."""
    ranks = [
        {
            "rank": number, "most_bytes": one, "peak_bytes": one, "start_bytes": one // 8, "save": {"peak": one // 4},
            "at_peak_bytes": {"parameters": one // 4, "optimizer state": one // 4, "activations and buffers": one // 2},
        }
        for number, one in enumerate(most)
    ]  # fmt: skip
    return {"ranks": 16, "axes": {"dp_replicate": 1, "dp_shard": 4, "tp": 4}, "job": {}, "of_ranks": ranks, **keys}


def healthy(directory: Path) -> Planted:
    return Planted(directory).starts().trains(100).evaluates().saves().trains(100).evaluates().saves().ends()


def data_bound(directory: Path) -> Planted:
    return Planted(directory).starts().trains(200, data=0.5).ends()


def communication_bound(directory: Path) -> Planted:
    return Planted(directory).starts().trains(200, communication=0.6).ends()


def memory_unused(directory: Path) -> Planted:
    return Planted(directory).starts().trains(200, memory=31 * GB).ends()


def straggling(directory: Path) -> Planted:
    slow = {"straggler": {"rank": 5, "node": "node2", "cause": "data", "excess_seconds": 0.31}}
    warning = "rank 5 on node2 is slow: its data takes 0.31 s longer a step than that of others, which have waited 10 s for it"
    return (
        Planted(directory).starts().trains(60).says(warning, "WARNING").trains(140, communication=0.3, more=slow).ends()
    )


def pipeline_idle(directory: Path, bubble: float = 0.3, **tables: Any) -> Planted:
    """Four stages and eight micro batches, which leave 3/11 of a step empty."""
    of_job = {"batch": {"global_size": 64}, "parallelism": {"pipeline": {"size": 4, "schedule": "1f1b"}}, **tables}
    planted = Planted(directory, **of_job)
    planted.mesh = "pp 4 x tp 4"
    return planted.starts().trains(200, more={"pipeline_bubble": bubble}).ends()


def out_of_memory(directory: Path) -> Planted:
    said = (
        "rank 3 on node1 ran out of memory in step 3: asked for 2.00 GiB, 1.25 GiB of 79.11 GiB are free on NVIDIA H100 0; what "
        'helps, the cheapest first: [activation_checkpointing] mode = "full"; [batch] micro_size = 4'
    )
    planted = Planted(directory).starts().trains(2, memory=79 * GB).says("rank 3 of 16 on node1 (mpi)", rank=3)
    planted.says(f"TrainingError: {said}", rank=3)
    planted.now += 1
    return planted.says("CommunicationError: rank 3 is gone")


def not_finite(directory: Path) -> Planted:
    return Planted(directory).starts().trains(50).saves().trains(7).says(
        "TrainingError: step 58: loss nan, gradient norm nan, expected finite numbers"
    )  # fmt: skip


def killed_and_resumed(directory: Path) -> Planted:
    """200 steps of 0.71 s, of which 90 twice; 50 s without a job."""
    planted = Planted(directory, checkpoint={"every_steps": 100}).starts().trains(100).saves().trains(90)
    return planted.resumes(50).trains(100).saves().ends()


STORIES = [
    healthy, data_bound, communication_bound, memory_unused, straggling, pipeline_idle, out_of_memory, not_finite,
    killed_and_resumed,
]  # fmt: skip
