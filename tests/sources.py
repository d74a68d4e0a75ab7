"""The source files that the rules of the house hold for: hpctrain's, and those of every distribution under plugins/; and keys that
a page lists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def sources() -> list[Path]:
    """Every Python file of a package, without tests and examples."""
    plugins = (ROOT / "plugins").glob("**/*.py")
    return [*(ROOT / "hpctrain").glob("**/*.py"), *(one for one in plugins if not {"tests", "examples"} & {*one.parts})]


def keys_of_metrics_page() -> set[str]:
    """The keys in the first columns of the tables in docs/metrics.md."""
    lines = (ROOT / "docs" / "metrics.md").read_text().splitlines()
    return {key for line in lines if line.startswith("| `") for key in re.findall(r"`(\w+)`", line.split("|")[1])}
