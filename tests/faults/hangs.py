"""Jobs in which a rank hangs, each in its own way. `python tests/faults/hangs.py` runs them all and prints a table."""

from __future__ import annotations

import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tomli_w

PROGRAMS = Path(__file__).parent / "programs"
LIMIT = 2.0
"""[watchdog] timeout_seconds."""
LATE = 5.0
"""Seconds after the limit within which the hang must be told."""

sys.path.insert(0, str(Path(__file__).parent.parent))
from launching import hpctrain, run  # noqa: E402


@dataclass(frozen=True)
class Planted:
    """A hang. told: what the diagnosis must say, in its lines about missing or waiting ranks."""

    plant: str
    told: tuple[str, ...]
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """For tests."""
        return self.plant + "-alarm" * ("communicator.timeout_seconds=5" in self.options)


OTHERS_WAIT = "waiting: ranks 0, 2 on"
PLANTED = [
    Planted("sleep", ("missing: rank 1 on", "step 2, forward", "time.sleep(10_000)  # in a forward", OTHERS_WAIT)),
    Planted("input", ("missing: rank 1 on", "step 2, forward", "os.read(os.pipe()[0], 1)", OTHERS_WAIT)),
    Planted("loop", ("missing: rank 1 on", "step 2, forward", "planted.py:", " in hang: ", OTHERS_WAIT)),
    Planted("stop", ("missing: rank 1 on", "has sent no heartbeat", OTHERS_WAIT)),
    Planted(
        "stop-first", ("rank 0 has ended, or its node is out of reach", "step 2, sums of gradients", "gradients.py:")
    ),
    Planted("group", ("waiting: rank 0 on", "planted.py:", "dist.barrier(group=self.pair)", "waiting: ranks 1-2 on")),
    Planted(  # communication fails before the watchdog's limit
        "sleep",
        ("a communication of rank", "failed (", "missing: rank 1 on", "time.sleep(10_000)  # in a forward"),
        ("communicator.timeout_seconds=5", "watchdog.timeout_seconds=60"),
    ),
    Planted(
        "worker",
        (", data for", "a process that loads samples is at", "planted.py:", "in __getitem__"),
        ("dataset.workers=1", "watchdog.timeout_seconds=20"),
    ),
    Planted("mismatch", ("different operations", "rank 1 all_reduce(float32, 12 bytes)")),
    Planted(
        "evaluation",
        ("missing: rank 1 on", "evaluation", "time.sleep(10_000)  # in an evaluation"),
        ("evaluation.every_steps=1", "evaluation.batches=4"),
    ),
]


def write_job(directory: Path) -> None:
    tables = {
        "job": {"name": "planted", "steps": 10, "output_dir": "out"},
        "model": {"name": "planted:net", "loss": "planted:loss"},
        "dataset": {"name": "planted:data"},
        "optimizer": {"name": "sgd", "lr": 0.01},
        "batch": {"global_size": 12, "micro_size": 2},
        "watchdog": {"timeout_seconds": LIMIT},
    }
    (directory / "job.toml").write_text(tomli_w.dumps(tables))


def environment(plant: str) -> dict[str, str]:
    """The variables of a job with this hang."""
    return {"PLANT": plant, "PYTHONPATH": f"{PROGRAMS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def tell(planted: Planted, communicator: str, directory: Path) -> tuple[int, str, float]:
    """The exit code, the output, and the seconds of the whole command."""
    write_job(directory)
    sets = [word for option in planted.options for word in ("--set", option)]
    begin = time.monotonic()
    done = run(
        hpctrain("run", "job.toml", "-n", "3", "--set", f"communicator.name={communicator}", *sets),
        directory,
        90,
        environment(planted.plant),
    )
    return done.code, done.out + done.err, time.monotonic() - begin


def idle_seconds(output: str) -> float:
    """How long the longest wait had lasted when it was told."""
    return max([float(found) for found in re.findall(r"for (\d+) s", output)], default=0.0)


def main() -> None:
    """The table."""
    for communicator in ("mpi", "gloo"):
        for planted in PLANTED:
            if (communicator, planted.plant) == ("gloo", "mismatch"):  # compared by torch, if its debug level says so
                continue
            with tempfile.TemporaryDirectory() as directory:
                code, output, seconds = tell(planted, communicator, Path(directory))
            missing = [words for words in planted.told if words not in output]
            found = "named" if code == 4 and not missing else f"NOT named: {missing}"
            print(
                f"{communicator:5} {planted.name:15} exit {code}, told after {idle_seconds(output):3.0f} s (limit {LIMIT:g}), "
                f"{seconds:5.1f} s in all: {found}",
                flush=True,
            )
            if missing:
                print(output)


if __name__ == "__main__":
    main()
