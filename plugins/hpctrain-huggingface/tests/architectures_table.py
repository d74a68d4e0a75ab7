"""Writes docs/architectures.md from the results of ranks/test_architectures.py.

mpiexec -n 2 python -m pytest plugins/hpctrain-huggingface/tests/ranks/test_architectures.py -m "" --planned found.jsonl
python plugins/hpctrain-huggingface/tests/architectures_table.py found.jsonl docs
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HEAD = """# Architectures and layouts

`plugins/hpctrain-huggingface/tests/architectures_table.py` writes this table from `test_architectures.py` beside it:
tiny causal language models of transformers {version} on two ranks. Those that train had the losses and the gradient
norms of a plain loop in one process, to 1e-6 and 1e-5. The others are refused in a sentence, by `hpctrain check`, too.

"""


def main(found: Path, docs: Path) -> None:
    from transformers import __version__

    rows: dict[str, dict[str, str]] = {}
    for text in found.read_text().splitlines():
        row = json.loads(text)
        rows.setdefault(row["architecture"], {})[row["layout"]] = "trains" if row["found"] == "trains" else "refused"
    layouts = list(next(iter(rows.values())))
    lines = [["architecture", *layouts], ["---"] * (1 + len(layouts))]
    lines += [[name, *(cells[layout] for layout in layouts)] for name, cells in sorted(rows.items())]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    (docs / "architectures.md").write_text(HEAD.format(version=__version__) + table)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
