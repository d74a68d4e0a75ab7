"""Writes docs/reference/: the job file from its tables and plugins, the commands from click, hpctrain.api from its sources.

python tests/reference_pages.py
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import plugin_pages
from conversion_pages import conversions_page
from hpctrain_tools.listing import Option, describe_keys, describe_options

from hpctrain.cli import GROUPS, cli
from hpctrain.cli.groups import OpenGroup
from hpctrain.job.tables import Job
from hpctrain.registry.registry import build_registry
from hpctrain.registry.slots import SLOTS

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "docs" / "reference"
API = "hpctrain.api"
LATE = {
    "Job": ("hpctrain.job.tables", "Job"),
    "load": ("hpctrain.training.loading", "load"),
    "memory": ("hpctrain.training.meters.memory", "memory"),
    "own_loop": ("hpctrain.own_loops.loop", "own_loop"),
    "Loop": ("hpctrain.own_loops.loop", "Loop"),
    "plan": ("hpctrain_tools.plan.plan", "plan"),
    "run": ("hpctrain.training.rank", "run"),
}
"""Names that importing hpctrain does not import yet."""
JOB_HEAD = """# Reference: the job file

Every table and key, made by `tests/reference_pages.py` from the types that read a job file, and the options of
hpctrain's own plugins. [The job file](../job-file.md) explains how they work together; `hpctrain plugins show SLOT
NAME` shows the options of any installed plugin, `hpctrain schema` writes a JSON Schema for editors.
"""
COMMANDS_HEAD = """# Reference: commands

What `hpctrain COMMAND --help` says, made by `tests/reference_pages.py`. [Commands](../commands.md) explains them, and
lists the exit codes.
"""
API_HEAD = """# Reference: hpctrain, its interface for plugins, and hpctrain.mpi

Signatures and docstrings, made by `tests/reference_pages.py` from the sources. A program imports `hpctrain`. Plugins
import `hpctrain.api` and, for building blocks, `hpctrain.toolkit`.
"""


CONTRACTS_HEAD = """# Reference: the contracts of plugins

Signatures and docstrings of each slot's classes, made by `tests/reference_pages.py` from `hpctrain/contracts`. [The
pages of the slots](../plugins/index.md) explain them, with examples.
"""


def job_page() -> Iterator[str]:
    """The tables of a job file, each with its keys and the options of its plugins."""
    yield JOB_HEAD
    schema, registry = Job.model_json_schema(), build_registry()
    tables = {name: _table(content, schema["$defs"]) for name, content in schema["properties"].items()}
    for name, (title, table) in tables.items():
        yield f"## {title.format(name)}\n"
        if table is None:
            yield _wrapped(_line(schema["properties"][name].get("description", ""))) + "\n"
        else:
            yield from _rows(list(_keys(table, schema["$defs"])))
        yield from _plugins(name, registry)
    for name, slot in SLOTS.items():
        if slot.inner:
            yield f"## {name}\n"
            yield "An option of another table's plugin chooses it.\n"
            yield from _plugins(name, registry)


def _table(content: dict[str, Any], definitions: dict[str, Any]) -> tuple[str, dict[str, Any] | None]:
    """A table's heading with a place for its name, and the schema of its keys."""
    if "anyOf" in content:
        return _table(content["anyOf"][0], definitions)
    if "$ref" in content:
        return "[{}]", definitions[content["$ref"].rpartition("/")[2]]
    if content.get("type") == "array":
        return "[[{}]]", _table(content["items"], definitions)[1]
    inner = content.get("additionalProperties") or {}
    found = [one for one in inner.get("anyOf", [inner]) if "$ref" in one] if isinstance(inner, dict) else []
    return ("[{}.NAME]", _table(found[0], definitions)[1]) if found else ("[{}]", None)


def _keys(table: dict[str, Any], definitions: dict[str, Any]) -> Iterator[Option]:
    """The keys of a table; those of a table within it follow its own, as `loss_spike.factor`."""
    for option in describe_keys({**table, "$defs": definitions}):
        yield option
        content = table["properties"][option.key]
        for one in content.get("anyOf", [content]):
            inner = definitions.get(one.get("items", one).get("$ref", "").rpartition("/")[2])
            if inner is not None:
                yield from (replace(key, key=f"{option.key}.{key.key}") for key in _keys(inner, definitions))


def _plugins(slot: str, registry: Any) -> Iterator[str]:
    for (of, name), entry in sorted(registry.entries.items()):
        if of == slot and entry.source.distribution == "hpctrain":
            options = describe_options(entry.cls, registry)
            yield _wrapped(f"**{name}**: {_line(entry.cls.__doc__ or '')}") + "\n"
            if options:
                yield from _rows(options)


def _rows(options: list[Option]) -> Iterator[str]:
    yield "| key | type | default | |\n|---|---|---|---|"
    for one in options:
        default = one.default.removeprefix("default ")
        shown = default if default in ("required", "unset") else f"`{default}`"
        yield f"| `{one.key}` | {_cell(one.type)} | {_cell(shown)} | {_cell(one.help)} |"
    yield ""


def _line(text: str) -> str:
    return " ".join(inspect.cleandoc(text).partition("\n\n")[0].split())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def commands_page() -> Iterator[str]:
    """Each command with its arguments and options."""
    yield COMMANDS_HEAD
    context = click.Context(cli, info_name="hpctrain")
    for title, names in GROUPS.items():
        yield f"## {title}\n"
        for name in names:
            command = cli.get_command(context, name)
            assert command is not None
            yield from _command(command, f"hpctrain {name}", context)


def _command(command: click.Command, name: str, parent: click.Context) -> Iterator[str]:
    context = click.Context(command, info_name=name, parent=parent)
    words = " ".join(command.collect_usage_pieces(context))
    yield f"### {name}\n"
    yield f"    {name} {words}\n"
    yield _wrapped((command.help or "").replace("\b\n", "")) + "\n"
    options = [record for one in command.get_params(context) if (record := one.get_help_record(context))]
    if options:
        yield "| option | |\n|---|---|"
        yield from (f"| `{_cell(spelled)}` | {_cell(help)} |" for spelled, help in options)
        yield ""
    if isinstance(command, OpenGroup):
        ours = {
            *command.commands,
            *(offer.name for offer in command.offers() if offer.source.distribution == "hpctrain"),
        }
        for inner in command.list_commands(context):
            found = command.get_command(context, inner) if inner in ours else None
            if found is not None:
                yield from _command(found, f"{name} {inner}", context)
    elif isinstance(command, click.Group):
        for inner, found in sorted(command.commands.items()):
            yield from _command(found, f"{name} {inner}", context)


def api_page() -> Iterator[str]:
    """The names of both doors with their signatures and docstrings."""
    yield API_HEAD
    for door in ("hpctrain", API, "hpctrain.mpi", *toolkit(), "hpctrain_tools.bench", "hpctrain_tools.runs"):
        yield f"## {door}\n"
        names = (_names_of(door) or own_names(door)) | (LATE if door == "hpctrain" else {})
        for name, (module, original) in sorted(names.items(), key=lambda item: item[0].lower()):
            node = _found(module, original) if module.startswith("hpctrain") else None
            if isinstance(node, ast.ClassDef):
                yield from _class(name, node)
            elif isinstance(node, ast.FunctionDef):
                yield from _function(name, node, "###")
            else:
                yield f"### {name}\n" + ("" if node is None else f"\n    {ast.unparse(node)}\n")


def toolkit() -> list[str]:
    """The modules of hpctrain.toolkit."""
    files = sorted((PAGES.parent.parent / "hpctrain" / "toolkit").glob("**/[a-z]*.py"))
    return [".".join(file.relative_to(PAGES.parent.parent).with_suffix("").parts) for file in files]


def own_names(module: str) -> dict[str, tuple[str, str]]:
    """The public names that a module without `__all__` defines."""
    names = [name for node in _tree(module).body for name in _defines(node)]
    return {name: (module, name) for name in names if name[:1] != "_"}


def _class(name: str, node: ast.ClassDef) -> Iterator[str]:
    yield f"### {name}\n"
    bases = ", ".join(map(ast.unparse, node.bases))
    yield f"    class {name}({bases})\n" if bases else f"    class {name}\n"
    yield _wrapped(ast.get_docstring(node) or "") + "\n"
    for member, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(member, ast.AnnAssign) and isinstance(member.target, ast.Name) and member.target.id[:1] != "_":
            told = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
            yield _item(" ".join(ast.unparse(member).split()), str(told))
        elif isinstance(member, ast.FunctionDef) and (member.name[:1] != "_" or member.name == "__call__"):
            yield _item(_signature(member.name, member), ast.get_docstring(member) or "")
    yield ""


def _function(name: str, node: ast.FunctionDef, mark: str) -> Iterator[str]:
    yield f"{mark} {name}\n"
    yield f"    {_signature(name, node)}\n"
    yield _wrapped(ast.get_docstring(node) or "") + "\n"


def _item(code: str, told: str) -> str:
    text = f"`{code}`{': ' if told else ''}{' '.join(told.split())}"
    return textwrap.fill(
        text, 120, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _wrapped(text: str) -> str:
    """Paragraphs in lines of 120; what is indented, code and lists, as it is."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        part
        if re.search(r"^(    |- )", part, re.MULTILINE)
        else textwrap.fill(" ".join(part.split()), 120, break_long_words=False, break_on_hyphens=False)
        for part in parts
    )


def _signature(name: str, node: ast.FunctionDef) -> str:
    given = re.sub(r"^self(, )?", "", ast.unparse(node.args))
    return f"{name}({given})" + (f" -> {ast.unparse(node.returns)}" if node.returns else "")


def contracts_page() -> Iterator[str]:
    """The contract of each slot."""
    yield CONTRACTS_HEAD
    for name in plugin_pages.PAGES:
        yield f"## {name}\n"
        yield plugin_pages.contract(name) + "\n"


WRITTEN = {
    "job-file.md": job_page,
    "commands.md": commands_page,
    "api.md": api_page,
    "contracts.md": contracts_page,
    "conversions.md": conversions_page,
}


def page(name: str) -> str:
    """The whole page."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(WRITTEN[name]())).rstrip("\n") + "\n"


def _tree(module: str) -> ast.Module:
    path = ROOT / ("plugins" if module.startswith("hpctrain_") else "") / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _names_of(door: str) -> dict[str, tuple[str, str]]:
    """The names in `__all__`: where each comes from, and its name there."""
    body = _tree(door).body
    listed = next((node.value for node in body if isinstance(node, ast.Assign) and _defines(node) == ["__all__"]), None)
    names = [] if listed is None else ast.literal_eval(listed)
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    found = {one.asname or one.name: (str(node.module), one.name) for node in imports for one in node.names}
    return {name: found.get(name, (door, name)) for name in names}


def _found(module: str, name: str) -> ast.stmt | None:
    """The definition of `name`, also if `module` imports it from another one of hpctrain's."""
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("hpctrain.", "hpctrain_tools.")):
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


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for name in WRITTEN:
        (PAGES / name).write_text(page(name))
