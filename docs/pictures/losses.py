"""Trains one process and six layouts of the same job, and writes their losses into losses.json, which draw.py draws.

Each is a run of examples/quickstart.toml, cut down to 60 steps of a smaller GPT.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
JOB = HERE.parent.parent / "examples" / "quickstart.toml"
SMALL = [
    "job.steps=60", "model.hidden_size=64", "model.layers=2", "schedule.warmup_steps=10", "checkpoint.every_steps=0",
    "batch.micro_size=4", "evaluation.every_steps=0",
]  # fmt: skip
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "1 process": (1, []),
    "2 ranks, ZeRO 1": (2, ["sharding.stage=1"]),
    "2 ranks, ZeRO 3": (2, ["sharding.stage=3"]),
    "2 ranks, tensor": (2, ["parallelism.tensor=2"]),
    "2 ranks, context": (2, ["parallelism.context=2"]),
    "2 ranks, pipeline": (2, ["parallelism.pipeline=2"]),
    "4 ranks, tensor x ZeRO 2": (4, ["parallelism.tensor=2", "sharding.stage=2"]),
}


def losses(ranks: int, settings: list[str], directory: Path) -> list[float]:
    """The loss of each step of one run."""
    values = [*SMALL, *settings, f"job.output_dir={directory}"]
    words = [sys.executable, "-m", "hpctrain", "run", str(JOB), "-n", str(ranks)]
    subprocess.run([*words, *(word for value in values for word in ("--set", value))], check=True, timeout=600)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [float(f"{row['loss']:.10g}") for row in rows if "loss" in row]


def main() -> None:
    """Run all layouts."""
    lines = []
    with tempfile.TemporaryDirectory() as root:
        for number, (name, (ranks, settings)) in enumerate(LAYOUTS.items()):
            lines.append(f"{json.dumps(name)}: {json.dumps(losses(ranks, settings, Path(root) / str(number)))}")
    (HERE / "losses.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
