"""Writes the contracts and the shared examples of docs/plugins/*.md: signatures and docstrings from hpctrain, code from tests/outside.

python tests/plugin_pages.py
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
HOME = ROOT / "docs" / "plugins"
CONTRACTS = ROOT / "hpctrain" / "contracts"
HOOKS = ROOT / "hpctrain" / "plugins" / "hookspecs.py"
BEGIN, END = "<!-- contract: begin -->", "<!-- contract: end -->"
PAGES = {
    "base": ("Plugin", "Options", "ByteSize", "Problem", "Plan", "Machine", "Identity"),
    "model": (
        "ModelSpec",
        "MetaModel",
        "TokenModel",
        "PaddedModel",
        "AttentionModel",
        "TensorParallelModel",
        "ContextParallelModel",
        "PipelineModel",
        "Batch",
    ),
    "dataset": (
        "Dataset",
        "TextDataset",
        "DatasetContext",
        "Source",
        "Samples",
        "Stream",
        "Split",
        "Lengths",
        "Weights",
        "Collate",
    ),
    "optimizer": ("Optimizer", "OptimizerOptions"),
    "schedule": ("Schedule",),
    "parallelism": (
        "Parallelism",
        "AxisTraits",
        "AppliedAxis",
        "set_row_order",
        "Runner",
        "RunnerParts",
        "MicroBatch",
        "See",
    ),
    "pipeline_schedule": ("PipelineSchedule",),
    "sharding": ("Sharding", "ShardedModel", "GradientSums", "BucketSum", "Finish", "Piece", "pieces_of"),
    "precision": ("Precision", "LossScaler"),
    "activation_checkpointing": ("ActivationCheckpointing",),
    "compression": (
        "Compression",
        "LossyCompression",
        "CompressionOptions",
        "Compressor",
        "GradientBucket",
        "Span",
    ),
    "checkpoint": ("CheckpointFormat", "CheckpointWriter", "StoredTensor", "StoredChunk", "State"),
    "communicator": ("Communicator",),
    "logger": ("Logger", "LogWriter"),
    "hook": ("Hook", "LifeCycleHooks", "LiveModel", "Control", "PluginState"),
    "metric": ("Metric", "RunningMetric", "SummedMetric"),
    "scheduler": ("Scheduler", "Launch", "SubmittedRun", "Stage", "JobState"),
    "command": (),
}
"""The classes, functions and aliases of each page, in its order."""

Definition = ast.ClassDef | ast.FunctionDef | ast.Assign


def definitions() -> dict[str, Definition]:
    """Everything public that the contracts define, and the hooks, by name."""
    found: dict[str, Definition] = {}
    for file in (*sorted(CONTRACTS.glob("*.py")), HOOKS):
        for node in _documented(ast.parse(file.read_text()).body):
            for name in _names(node):
                found[name] = node
    return found


def contract(page: str) -> str:
    """The generated part of a page."""
    known = definitions()
    blocks = [*_registration(page, known["RegistrationHooks"]), *(_defined(known[name]) for name in PAGES[page])]
    return "\n\n".join((BEGIN, *blocks, END))


def _registration(page: str, hooks: Definition) -> Iterator[str]:
    assert isinstance(hooks, ast.ClassDef)
    for node in hooks.body:
        if isinstance(node, ast.FunctionDef) and node.name == f"hpctrain_{page}":
            assert node.returns is not None
            yield _wrapped(f"The registration hook `{node.name}` returns `{ast.unparse(node.returns)}`.")


def _defined(node: Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in node.bases if ast.unparse(base) not in ("ABC", "Protocol", "BaseModel")]
        title = f"### `{node.name}`" + (f", a `{'`, `'.join(bases)}`" if bases else "")
        members = [*_members(node)]
        return "\n\n".join([title, *_text(ast.get_docstring(node)), *(["\n".join(members)] if members else [])])
    if isinstance(node, ast.FunctionDef):
        return "\n\n".join([f"### `{node.name}`", f"`{_signature(node)}`", *_text(ast.get_docstring(node))])
    code = ast.unparse(node)
    shown = [f"`{code}`"] if len(code) < 80 else []
    return "\n\n".join([f"### `{_names(node)[0]}`", *shown, *_text(node.docstring)])  # type: ignore[union-attr]


def _members(node: ast.ClassDef) -> Iterator[str]:
    """A list item for each public attribute and method."""
    for member in _documented(node.body):
        if isinstance(member, (ast.AnnAssign, ast.Assign)):
            if _names(member)[0].startswith(("_", "model_config")):
                continue
            shown, required, text = _attribute(member), "", member.docstring  # type: ignore[union-attr]
        elif isinstance(member, ast.FunctionDef):
            decorators = {ast.unparse(one) for one in member.decorator_list}
            text = ast.get_docstring(member)
            if text is None and "abstractmethod" not in decorators:
                continue
            if member.name.startswith("_") and (not member.name.endswith("__") or member.name == "__setattr__"):
                continue
            returns = f": {ast.unparse(member.returns)}" if member.returns is not None else ""
            shown = f"{member.name}{returns}" if "property" in decorators else _signature(member)
            kinds = ["required"] if "abstractmethod" in decorators else []
            kinds += [word for word in ("property", "staticmethod") if word in decorators]
            required = f" ({', '.join(kinds)})" if kinds else ""
        else:
            continue
        paragraphs = [*_text(text, indent="  ", first=f"- **`{shown}`**{required}: ")] if text else [f"- **`{shown}`**{required}"]
        yield "\n\n".join(paragraphs)


def _attribute(node: ast.AnnAssign | ast.Assign) -> str:
    """Without ClassVar, which says where Python keeps a value, and without the description in a Field."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node)
    kind = re.sub(r"^ClassVar\[(.*)\]$", r"\1", ast.unparse(node.annotation))
    value = "" if node.value is None else ast.unparse(node.value)
    if isinstance(node.value, ast.Call):
        given = {word.arg: ast.unparse(word.value) for word in node.value.keywords}
        value = given.get("default", "")
    if value.startswith("_"):
        value = ""
    return f"{ast.unparse(node.target)}: {kind}" + (f" = {value}" if value else "")


def _signature(node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{node.name}({arguments}){returns}"


def _documented(body: list[ast.stmt]) -> Iterator[Definition]:
    """The definitions of a body, attributes with the docstring behind them in `docstring`."""
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            follows = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            node.docstring = _of_field(node) or (str(after.value.value) if follows else None)  # type: ignore
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.Assign, ast.AnnAssign)):
            yield node  # type: ignore[misc]


def _of_field(node: ast.Assign | ast.AnnAssign) -> str | None:
    """The description in a pydantic Field."""
    if isinstance(node.value, ast.Call):
        for word in node.value.keywords:
            if word.arg == "description":
                return str(ast.literal_eval(word.value))
    return None


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    return [node.name] if isinstance(node, (ast.ClassDef, ast.FunctionDef)) else []


def _text(docstring: str | None, indent: str = "", first: str = "") -> Iterator[str]:
    """The paragraphs of a docstring."""
    paragraphs = re.split(r"\n\s*\n", ast.literal_eval(repr(docstring))) if docstring else []
    for number, paragraph in enumerate(paragraphs):
        yield _wrapped(paragraph, indent, first if number == 0 else indent)


def _wrapped(text: str, indent: str = "", first: str = "") -> str:
    """Lines of at most 120 characters; a space in inline code ends none, unless the code is longer."""
    text = first + " ".join(text.split())
    text = re.sub(r"`[^`]+`", lambda found: found[0].replace(" ", "\0" if len(found[0]) < 100 else " "), text)
    lines = textwrap.wrap(
        text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    for line in lines[1:]:
        assert not re.match(r"\s*([*+#>|-]|\d+[.)]) ", line), f"this would begin a list: {line}"
    if not first.startswith("- ") and indent:
        lines[0] = indent + lines[0].lstrip()
    return "\n".join(lines).replace("\0", " ")


def example(path: str) -> str:
    """A file as the example of a page, without its docstring."""
    text = (ROOT / path).read_text()
    docstring = ast.parse(text).body[0]
    code = "\n".join(text.splitlines()[docstring.end_lineno :]).strip("\n")
    code = code.removeprefix("from __future__ import annotations\n").strip("\n")
    return f"<!-- example: {path} -->\n\n```python\n{code}\n```\n\n<!-- example: end -->"


def page(name: str) -> str:
    """A page with its generated parts as they should be."""
    text = (HOME / f"{name}.md").read_text()
    text = re.sub(rf"{BEGIN}.*?{END}", lambda _: contract(name), text, flags=re.DOTALL)
    return re.sub(
        r"<!-- example: (tests/\S+) -->.*?<!-- example: end -->", lambda found: example(found[1]), text, flags=re.DOTALL
    )


if __name__ == "__main__":
    for name in PAGES:
        (HOME / f"{name}.md").write_text(page(name))
