"""Runs loops of examples/own_loops one after the other on this rank: python own_loops.py JOB.toml LOOP[:DIRECTORY] ...

JOB.toml is each one's job, with the [batch] in samples.toml for those with data; its output is in DIRECTORY, or LOOP.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

LOOPS = Path(__file__).parents[1] / "examples" / "own_loops"
NAMES = tuple(sorted(path.stem for path in LOOPS.glob("*.py")))


def main(job: Path, named: list[str]) -> None:
    """Run them."""
    for one in named:
        name, _, directory = one.partition(":")
        text = job.read_text().replace("OUTPUT", directory or name)
        if name != "ppo":  # it has no data
            text += job.with_name("samples.toml").read_text()
        mine = job.with_name(f"{directory or name}.toml")
        mine.write_text(text)  # the same on all ranks
        sys.argv = [f"{name}.py", str(mine)]
        runpy.run_path(str(LOOPS / f"{name}.py"), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
