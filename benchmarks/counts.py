"""Counts the house: python benchmarks/counts.py [TREE]

TREE: a checkout, this one by default. Prints lines, files, arrows between rooms, words of pages, and the modules that are loaded at
the first step of the quick start, which it runs with this Python on one rank.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

FIRST_STEP = """
import json, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
from pathlib import Path

def tell(*_):
    handle.remove()
    found = {}
    for package in ("hpctrain", "hpctrain_plugins", "hpctrain_tools"):
        names = [n for n in sys.modules if n == package or n.startswith(package + ".")]
        files = [f for n in names if (f := getattr(sys.modules[n], "__file__", None))]
        found[package] = [len(names), sum(Path(f).read_text().count("\\n") for f in files)]
    print("LOADED" + json.dumps(found), flush=True)

handle = register_optimizer_step_pre_hook(tell)
import hpctrain
hpctrain.run(hpctrain.load_job(sys.argv[1], ["job.steps=1", "job.output_dir=run"]))
"""
"""A program that tells what is loaded when the optimizer steps for the first time."""


def files_of(folder: Path) -> list[Path]:
    """The Python files below a folder."""
    return [one for one in folder.rglob("*.py") if not {"tests", "examples", "benchmarks"} & {*one.parts}]


def lines_of(files: list[Path]) -> int:
    """The lines of files."""
    return sum(one.read_text().count("\n") for one in files)


def arrows(core: Path) -> set[tuple[str, str]]:
    """The rooms of the core that import from each other, as (importing, imported)."""
    found = set()
    for file in files_of(core):
        room = file.relative_to(core).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hpctrain."):
                other = str(node.module).split(".")[1]
                found |= {(room, other)} if other != room else set()
    return found


def comments(files: list[Path]) -> float:
    """The share of lines with a comment, in percent."""
    with_comment = sum(len(re.findall(r"(?:^|\s)# ", one.read_text())) for one in files)
    return 100 * with_comment / lines_of(files)


def loaded(tree: Path) -> dict[str, list[int]]:
    """Modules and their lines at the first step of the quick start, by package."""
    with tempfile.TemporaryDirectory() as directory:
        words = [sys.executable, "-c", FIRST_STEP, str(tree / "examples" / "quickstart.toml")]
        done = subprocess.run(words, cwd=directory, capture_output=True, text=True, timeout=600, check=False)
    line = next((one for one in done.stdout.splitlines() if one.startswith("LOADED")), None)
    assert line is not None, done.stderr
    found: dict[str, list[int]] = json.loads(line.removeprefix("LOADED"))
    return found


def main() -> None:
    tree = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent).resolve()
    core, plugins = tree / "hpctrain", tree / "plugins"
    for name, files in {
        "core": files_of(core), "slots": files_of(plugins / "hpctrain_plugins"), "tools": files_of(plugins / "hpctrain_tools"),
        "other distributions": [one for home in plugins.glob("hpctrain-*") for one in files_of(home)],
    }.items():  # fmt: skip
        if files:
            sizes = [lines_of([one]) for one in files]
            print(f"{name:20} {sum(sizes):>7,} lines, {len(files)} files, median {median(sizes):.0f}, most {max(sizes)}, "
                  f"comments {comments(files):.1f}%")  # fmt: skip
    tests = [*(tree / "tests").rglob("*.py"), *(tree / "conftest.py",), *plugins.glob("*/tests/**/*.py")]
    machinery = [one for one in tests if not one.name.startswith("test_")]
    print(f"{'tests':20} {lines_of(tests):>7,} lines, of these {lines_of(machinery):,} are no tests")
    found = arrows(core)
    print(f"{'rooms':20} {len({one for pair in found for one in pair})}, with {len(found)} arrows between them")
    docs = [one for one in (tree / "docs").rglob("*.md") if one.parent.name != "reference"]
    pages = [*docs, *tree.glob("*.md"), *plugins.glob("*/README.md"), *plugins.glob("*/*/README.md")]
    print(f"{'pages':20} {sum(len(one.read_text().split()) for one in pages):>7,} words in {len(pages)}")
    for package, (modules, lines) in loaded(tree).items():
        print(f"{'at the first step':20} {lines:>7,} lines in {modules} modules of {package}")


if __name__ == "__main__":
    main()
