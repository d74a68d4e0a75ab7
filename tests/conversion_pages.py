"""Writes the tables of keys in docs/from-deepspeed.md and docs/from-accelerate.md from the rules of `hpctrain convert`.

python tests/conversion_pages.py
"""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain_tools.convert.conversion import LIBRARIES
from hpctrain_tools.convert.rules import Rule

DOCS = Path(__file__).parent.parent / "docs"
BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"
_TOLD = {"is": "{}", "not needed": "not needed: {}", "no counterpart": "**no counterpart**: {}"}


def told(rule: Rule) -> str:
    """The counterpart of a key, for a table."""
    if rule.harmless is not False:
        return f"`{json.dumps(rule.harmless)}` is not needed, others have **no counterpart**: {rule.says}"
    return _TOLD[rule.kind].format(rule.says)


def page(library: str) -> str:
    """The text of a page with its table."""
    head, _, rest = (DOCS / f"from-{library}.md").read_text().partition(BEGIN)
    rows = [f"| `{rule.key}` | {told(rule)} |" for rule in LIBRARIES[library].rules.values()]
    return "\n".join([f"{head}{BEGIN}", "", "| key | here |", "|---|---|", *rows, "", END]) + rest.partition(END)[2]


if __name__ == "__main__":
    for name in LIBRARIES:
        text = page(name)
        (DOCS / f"from-{name}.md").write_text(text)
