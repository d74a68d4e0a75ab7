"""Writes docs/metrics.md from the docstrings of the rows in hpctrain/training/metrics.py.

python tests/metrics_page.py > docs/metrics.md
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE, PAGE = ROOT / "hpctrain" / "training" / "metrics.py", ROOT / "docs" / "metrics.md"
ROWS = {
    "Every row": "Moment",
    "A step": "StepRow",
    "Measurements": "MeasuredRow",
    "Rank 0's own": "OwnRow",
    "An evaluation": "EvaluationRow",
}
HEAD = """# The metrics of a run

`OUTPUT_DIR/metrics.jsonl` has one JSON object per line: one for each optimizer step and one for each evaluation.
Loggers get the same rows. JSON has no NaN and no infinity: such a number is `null`. A resume drops the rows after the
checkpoint that it begins with.

```python
import json

rows = [json.loads(line) for line in open("runs/tiny/metrics.jsonl")]
losses = [row["loss"] for row in rows if "loss" in row]
evaluations = {row["step"]: row["evaluation_loss"] for row in rows if "evaluation_loss" in row}
```

Models that read ids count tokens, others samples. A plugin's hook may add keys of its own (`hpctrain_step_end`,
`hpctrain_evaluation`, see [hooks](plugins/hook.md)). `tests/metrics_page.py` writes this page from the docstrings in
`hpctrain/training/metrics.py`.
"""


def lines() -> Iterator[str]:
    """The page, line by line."""
    yield HEAD
    classes = {node.name: node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.ClassDef)}
    for title, name in ROWS.items():
        yield f"## {title}\n"
        yield f"{ast.get_docstring(classes[name])}\n"
        yield "| key | value |\n|---|---|"
        for field, text in fields(classes[name]):
            named = re.fullmatch(r"Keys? (.+?): (.+)", text)
            key, meaning = (named[1], named[2][0].upper() + named[2][1:]) if named else (f"`{field}`", text)
            yield f"| {key} | {meaning} |"
        yield ""


def fields(row: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Each field of a dataclass with its docstring."""
    for node, after in zip(row.body, row.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), (
                f"{node.target.id} lacks a docstring"
            )
            yield node.target.id, " ".join(str(after.value.value).split())


def page() -> str:
    """The whole page."""
    return "\n".join(lines()).rstrip("\n") + "\n"


if __name__ == "__main__":
    print(page(), end="")
