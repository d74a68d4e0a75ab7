"""A job of a few steps that trains in milliseconds, in a directory of its own: the fixture `job` of all tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli_w
from launching import wait_until

TINY: dict[str, Any] = {
    "job": {"name": "tiny", "steps": 4, "output_dir": "out"},
    "model": {
        "name": "gpt", "hidden_size": 16, "layers": 2, "attention_heads": 2, "vocab_size": 64, "max_seq_length": 8,
    },
    "dataset": {"name": "synthetic", "samples": 500},
    "optimizer": {"name": "adamw", "lr": 0.01},
    "batch": {"global_size": 12, "micro_size": 1},
}  # fmt: skip
"""A job that trains in milliseconds; 12 samples divide over 1, 2, 3 and 4 ranks."""


class JobFile:
    """job.toml in its own directory, changed key by key."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / "job.toml"
        self.tables = json.loads(json.dumps(TINY))
        self.write()

    def set(self, **tables: dict[str, Any]) -> JobFile:
        """Merge `tables` into the job, and write the file."""
        for name, table in tables.items():
            self.tables.setdefault(name, {}).update(table)
        self.write()
        return self

    def write(self) -> None:
        self.path.write_text(tomli_w.dumps(self.tables))

    @property
    def output(self) -> Path:
        return self.directory / str(self.tables["job"]["output_dir"])

    def sleeps(self, seconds: float) -> JobFile:
        """A plugin `slow` beside the job, with which each step takes so much longer; the job or a command must load it."""
        (self.directory / "slow.py").write_text(
            "import time\n\nfrom hpctrain.api import hookimpl\n\n\n"
            f"@hookimpl\ndef hpctrain_step_end(step):\n    time.sleep({seconds})\n"
        )
        return self

    def wait_for_steps(self, steps: int, seconds: float = 90) -> None:
        """Return when metrics.jsonl has so many lines."""
        path = self.output / "metrics.jsonl"
        wait_until(lambda: path.exists() and path.read_text().count("\n") >= steps, seconds, f"{steps} steps")

    def rows(self, output: str | None = None) -> list[dict[str, Any]]:
        """The steps' rows of metrics.jsonl. A last line that is being written does not count."""
        path = (self.directory / output if output else self.output) / "metrics.jsonl"
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [row for row in map(json.loads, whole) if "loss" in row]

    def losses(self, output: str | None = None) -> list[float]:
        return [row["loss"] for row in self.rows(output)]
