"""The source files that the rules of the house hold for: hpctrain's, and those of every distribution under plugins/."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent


def sources() -> list[Path]:
    """Every Python file of a package, without tests and examples."""
    plugins = (ROOT / "plugins").glob("**/*.py")
    return [*(ROOT / "hpctrain").glob("**/*.py"), *(one for one in plugins if not {"tests", "examples"} & {*one.parts})]
