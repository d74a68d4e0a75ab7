"""The keys of other libraries' configurations, from the rules of `hpctrain convert`, for reference_pages.py."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from hpctrain_tools.convert.conversion import LIBRARIES
from hpctrain_tools.convert.rules import Rule

HEAD = """# Reference: keys of other libraries

Each key that `hpctrain convert` knows, made by `tests/reference_pages.py` from its rules: what a job file has in its
place, that it is not needed, or that it has no counterpart.
"""
_TOLD = {"is": "{}", "not needed": "not needed: {}", "no counterpart": "**no counterpart**: {}"}


def told(rule: Rule) -> str:
    """The counterpart of a key, for a table."""
    if rule.harmless is not False:
        return f"`{json.dumps(rule.harmless)}` is not needed, others have **no counterpart**: {rule.says}"
    return _TOLD[rule.kind].format(rule.says)


def conversions_page() -> Iterator[str]:
    """A table for each library; the rules' links are those of a page one folder above."""
    yield HEAD
    for library, one in LIBRARIES.items():
        yield f"## {library}\n"
        yield "| key | here |\n|---|---|"
        for rule in one.rules.values():
            text = re.sub(r"\]\((?!https?:|#)", "](../", told(rule))
            yield f"| `{rule.key}` | {text} |"
        yield ""
