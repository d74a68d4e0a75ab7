"""Makes docs/equivalence.md of what the equivalence tests found.

for n in 1 2 4 8; do OMP_NUM_THREADS=1 mpiexec -n $n python -m pytest tests/ranks --equivalence found.jsonl; done
python tests/equivalence_table.py found.jsonl > docs/equivalence.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BOUNDS = {
    "fp32": "2e-6 and 1e-5",
    "fp64": "1e-10 and 1e-10",
    "bf16": "2e-3 and 1e-1, of the fp32 curve",
    "fp16": "5e-4 and 2.5e-2, of the fp32 curve",
}

HEAD = """# Every layout gives the curve of one process

Written by `tests/equivalence_table.py` from a run of `tests/ranks`. A tiny GPT (hidden size 20, 2 layers, 61 ids, 8
tokens: numbers that the ranks do not divide) trains 10 steps of 24 samples on each layout, and the losses and
gradient norms are held against a plain torch loop in one process that knows nothing of hpctrain's ranks, buckets or
sharding (`tests/plain.py`). Deviations are relative, the largest over all steps and cases. The cases of a row are
AdamW, and SGD with momentum and a clip that binds in about half of the steps (AdamW would hide a gradient of the
wrong scale); at once and accumulated over micro batches; with and without activation checkpointing.

Bounds on losses and norms: """


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """A line per layout, number of ranks and precision."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["precision"], row["ranks"], row["layout"]), []).append(row)
    order = {precision: number for number, precision in enumerate(BOUNDS)}
    lines = ["| precision | ranks | layout | cases | losses | gradient norms |", "|---|---|---|---|---|---|"]
    for key in sorted(groups, key=lambda k: (order[k[0]], k[1], k[2])):
        cases = groups[key]
        distinct = {(c["optimizer"], c["accumulated"], c["checkpointing"]) for c in cases}
        worst = [max(c[what] for c in cases) for what in ("loss", "norm")]
        precision, ranks, layout = key
        lines.append(f"| {precision} | {ranks} | {layout} | {len(distinct)} | {worst[0]:.1e} | {worst[1]:.1e} |")
    return lines


def main() -> None:
    rows = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    bounds = "; ".join(f"{precision} {bound}" for precision, bound in BOUNDS.items())
    print(HEAD + bounds + ".\n")
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
