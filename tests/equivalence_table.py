"""Writes docs/equivalence.md from the results of the equivalence tests.

export OMP_NUM_THREADS=1
for n in 1 2 3 4 8; do
  mpiexec -n $n python -m pytest tests/ranks -k "stages or layouts or token" --equivalence found.jsonl -m ""
done
mpiexec -n 16 python -m pytest tests/ranks -k four_dimensions --equivalence found.jsonl
python tests/equivalence_table.py found.jsonl docs
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BOUNDS = {"fp32": (2e-6, 1e-5), "fp64": (1e-10, 1e-10), "bf16": (2e-3, 1e-1), "fp16": (5e-4, 2.5e-2)}
"""Relative bounds on losses and gradient norms, which the tests enforce. 16-bit modes are compared with the fp32 curve."""

HEAD = """# Every layout gives the curve of one process

![The losses of one process and of six layouts lie on each other](pictures/losses.svg)

`tests/equivalence_table.py` writes this page from a run of `tests/ranks`. A tiny GPT (hidden size 20, 2 layers, 61
ids, 8 tokens: numbers that the ranks do not divide) trains 6 steps of 24 samples on each layout. The tests compare
its losses and gradient norms with a plain torch loop in one process (`tests/plain.py`), which does not use hpctrain's
ranks, buckets or sharding. The picture is of another run: `python docs/pictures/losses.py` trains a GPT of 0.1
million parameters for 60 steps.
"""
NOTES = """
- **Deviations** are relative: the largest over all steps and cases. The tests' bound is in parentheses.
- **Layouts**: data parallelism with the stages 0 to 3, tensor, context and pipeline parallelism and their
  combinations on up to 16 ranks.
- **Optimizers**: AdamW, and SGD with momentum and a clip that binds in about half of the steps. AdamW would hide
  gradients of the wrong scale.
- **Cases**: a step at once or accumulated over micro batches, with and without activation checkpointing.
- **bf16 and fp16** are compared with the float32 curve.
- **"Tokens"** are batches by token budget, of samples of 1 to 8 tokens, compared with a loop that forwards each
  sample alone. "Packed" ones lie in rows with others.
"""


def found(cases: Sequence[dict[str, Any]], precision: str) -> str:
    """The largest deviations of losses and norms, with their bounds."""
    bounds = zip(("loss", "norm"), BOUNDS[precision], strict=True)
    return " | ".join(f"{max(c[what] for c in cases):.1e} ({bound:.1e})" for what, bound in bounds)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line per precision and number of ranks."""
    lines = ["| precision | ranks | layouts | cases | losses | gradient norms |", "|---" * 6 + "|"]
    for precision in BOUNDS:
        for ranks in sorted({row["ranks"] for row in rows if row["precision"] == precision}):
            cases = [row for row in rows if (row["precision"], row["ranks"]) == (precision, ranks)]
            layouts = len({row["layout"] for row in cases})
            lines.append(f"| {precision} | {ranks} | {layouts} | {len(cases)} | {found(cases, precision)} |")
    return lines


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    (Path(sys.argv[2]) / "equivalence.md").write_text("\n".join([HEAD, *summary(rows), NOTES]))


if __name__ == "__main__":
    main()
