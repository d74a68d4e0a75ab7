"""Describes the public interface of plugins, a line for each name, and keeps the description of API_VERSION as a record.

python tests/plugin_api.py

writes the record anew. It refuses while the record of this API_VERSION says something else: every change raises the version
(docs/plugin-api.md). A version that nobody else has yet, such as one of your branch, is recorded anew once its record is deleted.
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORD = ROOT / "tests" / "unit" / "plugin_api.txt"
PAGE = ROOT / "docs" / "plugin-api.md"
API = "hpctrain.api"
TOOLKIT = "hpctrain.toolkit"
"""A package that is public as a whole; its doors to other rooms with the names in their `__all__`."""


def describe() -> list[str]:
    """The interface: names of hpctrain.api and hpctrain.mpi, contracts with their members, hooks, the toolkit, the core's keys."""
    lines = set(_of_door(API)) | set(_of_door("hpctrain.mpi"))
    for file in sorted((ROOT / TOOLKIT.replace(".", "/")).glob("**/*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        lines |= set(_of_door(module)) or {line for node in _tree(module).body for line in _described(module, node)}
    lines |= {line for node in _tree("hpctrain.plugins.hookspecs").body for line in _hooks(node)}
    return sorted(lines | set(_keys()))


def recorded() -> tuple[int, list[str]]:
    """The version and the lines of the record."""
    first, *lines = RECORD.read_text().splitlines()
    return int(first.rpartition(" ")[2]), lines


def difference(old: list[str], new: list[str]) -> list[str]:
    """The lines that came and went."""
    return [
        line for line in difflib.unified_diff(old, new, lineterm="", n=0) if line[:1] in "+-" and line[1:2] not in "+-"
    ]


def _tree(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _of_door(door: str) -> Iterator[str]:
    """The names in `__all__` of a module that is a door to others; nothing for a module without one."""
    names = _names_of(door)
    for name, (module, original) in names.items():
        yield from _of_name(door, names, name, module, original)


def _names_of(door: str) -> dict[str, tuple[str, str]]:
    """The names in `__all__`: where each comes from, and its name there."""
    body = _tree(door).body
    listed = next((node.value for node in body if isinstance(node, ast.Assign) and _defines(node) == ["__all__"]), None)
    names = [] if listed is None else ast.literal_eval(listed)
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    found = {one.asname or one.name: (str(node.module), one.name) for node in imports for one in node.names}
    return {name: found.get(name, (door, name)) for name in names}


def _of_name(door: str, public: Collection[str], name: str, module: str, original: str) -> Iterator[str]:
    """A public name; of a class also its members, those of base classes with no public name included."""
    yield f"{door}.{name}"
    if not module.startswith("hpctrain.") or name in ("Job", "API_VERSION"):
        return  # another package's; a table of the job file; the version itself
    node = _found(module, original)
    yield from _described(door, node, name) if node is not None else ()
    for base in node.bases if isinstance(node, ast.ClassDef) else ():
        hidden = _found(module, ast.unparse(base))
        if isinstance(hidden, ast.ClassDef) and hidden.name not in public:
            yield from _described(door, hidden)


def _found(module: str, name: str) -> ast.stmt | None:
    """The definition of `name`, also if `module` imports it from another one of hpctrain's."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hpctrain."):
            for one in node.names:
                if (one.asname or one.name) == name:
                    return _found(str(node.module), one.name)
        if name in _defines(node):
            return node
    return None


def _defines(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [one.id for one in targets if isinstance(one, ast.Name)]


def _described(where: str, node: ast.stmt, public_name: str = "") -> Iterator[str]:
    """A definition and, of a class, its public members."""
    for name in [public_name] if public_name else _defines(node):
        if name.startswith("_") and not (name.startswith("__") and isinstance(node, ast.FunctionDef)):
            continue
        if isinstance(node, ast.ClassDef):
            yield f"{where}.{name}({', '.join(map(ast.unparse, node.bases))})"
            yield from (line for member in node.body for line in _described(f"{where}.{name}", member))
        elif isinstance(node, ast.FunctionDef):
            marks = "".join(f"@{ast.unparse(one)} " for one in node.decorator_list)
            yield f"{marks}{where}.{name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns) if node.returns else '?'}"
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and name != "__all__":
            yield f"{where}.{' '.join(ast.unparse(_WithoutHelp().visit(node)).split())}"


class _WithoutHelp(ast.NodeTransformer):
    """Removes the descriptions of options, which are no part of the interface."""

    def visit_keyword(self, node: ast.keyword) -> ast.keyword | None:
        return None if node.arg == "description" else node


def _hooks(node: ast.stmt) -> Iterator[str]:
    """A line for each hook and for each of its arguments: an implementation takes those that it needs."""
    for hook in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(hook, ast.FunctionDef):
            yield f"hook {hook.name} -> {ast.unparse(hook.returns) if hook.returns else '?'}"
            for one in hook.args.args[1:]:
                yield f"hook {hook.name}({ast.unparse(one)})"


def _keys() -> Iterator[str]:
    """The core's keys in the tables of plugins, which no option of a plugin may have."""
    from hpctrain.plugins.slots import TABLES, table_class

    for slot in TABLES:
        for key in table_class(slot).model_fields:
            yield f"key [{slot.name}] {key}"


def main() -> int:
    from hpctrain.plugins.changes import API_VERSION

    lines = describe()
    if RECORD.exists():
        version, old = recorded()
        changes = difference(old, lines)
        if changes and version == API_VERSION:
            print("\n".join(changes))
            print(
                f"\nthe interface is no longer that of version {version}: raise API_VERSION in hpctrain/plugins/changes.py, list "
                f"there what was removed or means something else, describe the version in {PAGE.relative_to(ROOT)}, run this again"
            )
            return 1
    RECORD.write_text("\n".join([f"plugin API version {API_VERSION}", *lines]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
