"""Counts the lines of examples/own_loops and of the same loops with Accelerate and Fabric, which stand beside this file.

    python benchmarks/own_loops/count.py

Prints a markdown table. A line is a logical one: a call that is wrapped over several lines counts once. Blank lines, comments,
docstrings and imports don't count, nor does what all three versions share word by word outside of the loop: data, nets, functions.
Our programs are given a job file, whose lines that are not blank have a column of their own; the others have these values, and the
directory, among their arguments.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
OURS = HERE.parents[1] / "examples" / "own_loops"
NAMES = tuple(sorted(path.stem for path in OURS.glob("*.py")))
JOB = """[job]
name = "NAME"
steps = 6
"""
BATCH = """
[batch]
global_size = 24
micro_size = 24
"""


def job_of(name: str) -> str:
    """The job file of a loop; PPO makes its data itself."""
    return JOB.replace("NAME", name) + ("" if name == "ppo" else BATCH)


def versions(name: str) -> list[Path]:
    """The three programs: with hpctrain, Accelerate, Fabric."""
    return [directory / f"{name}.py" for directory in (OURS, HERE / "accelerate", HERE / "fabric")]


def outside(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a program outside of its loop: at the top, and those right inside of our `with`."""
    for node in tree.body:
        yield node
        yield from node.body if isinstance(node, ast.With) else ()


def shared(name: str) -> set[str]:
    """What all versions say outside of the loop."""
    said = [{ast.unparse(node) for node in outside(ast.parse(path.read_text()))} for path in versions(name)]
    return set.intersection(*said)


def count(path: Path) -> int:
    """The lines of a program that count."""
    text, known = path.read_text(), shared(path.stem)
    tree = ast.parse(text)
    free = [node for node in outside(tree) if ast.unparse(node) in known]
    free += [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and _is_free(node)]
    left_out = {line for node in free for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(one.type == tokenize.NEWLINE and one.start[0] not in left_out for one in tokens)


def _is_free(node: ast.stmt) -> bool:
    """Whether it is an import or a docstring."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_text or isinstance(node, (ast.Import, ast.ImportFrom))


def table() -> str:
    """A row for each loop, and their sums."""
    rows = []
    for name in NAMES:
        ours, *others = map(count, versions(name))
        rows.append([ours, sum(bool(line) for line in job_of(name).splitlines()), *others])
    lines = ["| loop | here | its job file | Accelerate | Fabric |", "|---|---|---|---|---|"]
    for name, figures in zip((*NAMES, "all six"), [*rows, map(sum, zip(*rows, strict=True))], strict=True):
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(map(str, figures))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
