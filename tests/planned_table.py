"""Writes docs/lab/planned.md from the results of tests/ranks/test_planned.py.

for n in 1 2 4; do
  mpiexec -n $n python -m pytest tests/ranks/test_planned.py -m "thorough or not thorough" --planned found.jsonl
done
mpiexec -n 2 python -m pytest tests/ranks/test_planned.py -m thorough -k host --late --device sim --planned found.jsonl
python tests/planned_table.py found.jsonl docs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HEAD = """# Plans and steps

`tests/planned_table.py` writes this table from `tests/ranks/test_planned.py`: what [`hpctrain plan`](../planning.md)
says of the first rank that it shows, and what the second step of the same job took there. GPT of 4 layers, 64 wide,
unless a model is named. Jobs with something in host memory ran on the simulated accelerator of the tests, the others on
CPUs.

Kept: parameters, gradients and optimizer state, equal to the byte. Peak: the most bytes of tensors that live at once.
Sent: the inputs of all collectives and messages. A step also sums its count of labels and tells its figures, which a
plan leaves out: up to 300 bytes.

| job | ranks | kept, bytes | peak planned | peak of the step | ratio | sent planned | sent in the step |
|---|---|---|---|---|---|---|---|
"""


def line(row: dict[str, Any]) -> str:
    """The line of a job. Raises AssertionError where the plan is wrong."""
    assert row["kept"] == row["kept_measured"], row
    ratio = row["planned"] / row["measured"]
    cells = [
        row["job"],
        row["ranks"],
        f"{row['kept']:,}",
        f"{row['planned']:,}",
        f"{row['measured']:,}",
        f"{ratio:.4f}",
    ]
    return "| " + " | ".join(map(str, [*cells, f"{row['wire']:,}", f"{row['sent']:,}"])) + " |\n"


def main(found: Path, docs: Path) -> None:
    rows = [json.loads(text) for text in found.read_text().splitlines()]
    (docs / "lab" / "planned.md").write_text(HEAD + "".join(map(line, rows)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
