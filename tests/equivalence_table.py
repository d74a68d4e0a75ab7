"""Writes docs/equivalence.md from the results of the equivalence tests.

export OMP_NUM_THREADS=1
for n in 1 2 3 4 8; do
  mpiexec -n $n python -m pytest tests/ranks -k "stages or layouts or token" --equivalence found.jsonl
done
mpiexec -n 16 python -m pytest tests/ranks -k four_dimensions --equivalence found.jsonl
python tests/equivalence_table.py found.jsonl > docs/equivalence.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BOUNDS = {"fp32": (2e-6, 1e-5), "fp64": (1e-10, 1e-10), "bf16": (2e-3, 1e-1), "fp16": (5e-4, 2.5e-2)}
"""Relative bounds on losses and gradient norms, which the tests enforce. 16-bit modes are compared with the fp32 curve."""

HEAD = """# Every layout gives the curve of one process

`tests/equivalence_table.py` writes this page from a run of `tests/ranks`. A tiny GPT (hidden size 20, 2 layers, 61 ids, 8
tokens: numbers that the ranks do not divide) trains 10 steps of 24 samples on each layout. The tests compare its losses and
gradient norms with a plain torch loop in one process (`tests/plain.py`), which does not use hpctrain's ranks, buckets or
sharding.

- **Deviations** are relative: the largest over all steps and cases. The tests' bound is in parentheses.
- **Optimizers**: AdamW, and SGD with momentum and a clip that binds in about half of the steps. AdamW would hide gradients of
  the wrong scale.
- **Cases**: a step at once or accumulated over micro batches, with and without activation checkpointing.
- **bf16 and fp16** are compared with the float32 curve.
- **"Tokens"** are batches by token budget, of samples of 1 to 8 tokens, compared with a loop that forwards each sample alone.
"""


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line per layout, number of ranks and precision."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["precision"], row["ranks"], row["layout"]), []).append(row)
    order = {precision: number for number, precision in enumerate(BOUNDS)}
    lines = ["| precision | ranks | layout | optimizers | cases | losses | gradient norms |", "|---" * 7 + "|"]
    for key in sorted(groups, key=lambda k: (order[k[0]], k[1], k[2])):
        cases = groups[key]
        distinct = {(c["optimizer"], c["accumulated"], c["checkpointing"]) for c in cases}
        precision, ranks, layout = key
        names = ", ".join(sorted({"clipped sgd" if c["optimizer"] == "sgd" else c["optimizer"] for c in cases}))
        found = [
            f"{max(c[what] for c in cases):.1e} ({bound:.1e})"
            for what, bound in zip(("loss", "norm"), BOUNDS[precision], strict=True)
        ]
        lines.append(f"| {precision} | {ranks} | {layout} | {names} | {len(distinct)} | {found[0]} | {found[1]} |")
    return lines


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    print(HEAD)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
