"""The contracts of plugins from hpctrain's signatures and docstrings, for reference_pages.py; and the examples in docs/plugins/*.md
from tests/outside, which `python tests/plugin_pages.py` writes.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.registry.hookspecs import CommandHook
from hpctrain.registry.slots import SLOTS

ROOT = Path(__file__).parent.parent
HOME = ROOT / "docs" / "plugins"
CONTRACTS = ROOT / "hpctrain" / "contracts"
HOOKS = ROOT / "hpctrain" / "registry" / "hookspecs.py"
_LONG = 100
"""The length from which inline code may be broken into lines."""
PAGES = {
    "base": ("Plugin", "Options", "ByteSize", "Problem", "Plan", "Machine", "Identity"),
    "model": (
        "ModelSpec",
        "MetaModel",
        "TokenModel",
        "PaddedModel",
        "PackedModel",
        "AttentionModel",
        "TensorParallelModel",
        "ContextParallelModel",
        "DistributedAttentionModel",
        "PipelineModel",
        "ExportableModel",
        "Batch",
    ),
    "dataset": (
        "Dataset",
        "TextDataset",
        "DatasetContext",
        "Source",
        "Samples",
        "Stream",
        "Mixture",
        "Part",
        "Split",
        "Lengths",
        "Weights",
        "Collate",
    ),
    "optimizer": ("Optimizer", "OptimizerOptions", "MatrixOptimizer", "WholeTensors"),
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
    "profile": ("Profiler",),
    "hook": ("Hook", "LifeCycleHooks", "LiveModel", "Membership", "Control", "Request", "PluginState"),
    "metric": ("Metric", "RunningMetric", "SummedMetric"),
    "scheduler": ("Scheduler", "Launch", "SubmittedRun", "JobState"),
    "command": (),
}
"""The classes, functions and aliases of each page, in its order."""

Node = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Definition:
    """A class, a function or an attribute, with its docstring: of an attribute, the text behind it or its Field's description."""

    node: Node
    text: str | None

    @property
    def name(self) -> str:
        """The name that it defines; of several, the first."""
        if isinstance(self.node, (ast.ClassDef, ast.FunctionDef)):
            return self.node.name
        target = self.node.targets[0] if isinstance(self.node, ast.Assign) else self.node.target
        return ast.unparse(target)


def definitions(body: Sequence[ast.stmt]) -> Iterator[Definition]:
    """The definitions of a module or a class, in its order."""
    for node, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield Definition(node, ast.get_docstring(node))
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            value = after.value if isinstance(after, ast.Expr) else None
            behind = str(value.value) if isinstance(value, ast.Constant) else None
            yield Definition(node, _keywords(node.value).get("description") or behind)


def contract(page: str) -> str:
    """The contract of a slot, or of what every plugin has."""
    files = (*sorted(CONTRACTS.glob("*.py")), HOOKS)
    known = {one.name: one for file in files for one in definitions(ast.parse(file.read_text()).body)}
    blocks = [*_registration(page), *(_shown(known[name]) for name in PAGES[page])]
    return "\n\n".join(blocks)


def _registration(page: str) -> Iterator[str]:
    if page in SLOTS:
        yield _wrapped(
            f"The registration hook `{SLOTS[page].hook}` returns `list[type[{SLOTS[page].contract.__name__}]]`."
        )
    if page == "command":
        yield "The registration hook `hpctrain_command` returns `click.Command`."
        yield from _text(CommandHook.hpctrain_command.__doc__)


def _shown(one: Definition) -> str:
    """A heading, the docstring, and the members of a class."""
    node, title, code, members = one.node, f"### `{one.name}`", "", ""
    if isinstance(node, ast.ClassDef):
        bases = [base for base in map(ast.unparse, node.bases) if base not in ("ABC", "Protocol", "BaseModel")]
        title += "".join(f", a `{base}`" for base in bases)
        members = "\n".join(_member(member) for member in definitions(node.body) if _is_told(member))
    elif isinstance(node, ast.FunctionDef):
        code = f"`{_signature(node)}`"
    elif "Validator" not in ast.unparse(node):  # a type that pydantic checks says in words what it takes
        code = f"`{ast.unparse(node)}`"
    return "\n\n".join(part for part in (title, code, *_text(one.text), members) if part)


def _is_told(member: Definition) -> bool:
    """Whether a page has the member: public ones, of methods those that have a docstring or are required."""
    if isinstance(member.node, ast.ClassDef) or member.name == "model_config":
        return False
    if isinstance(member.node, ast.FunctionDef):
        is_operator = member.name.endswith("__") and member.name != "__setattr__"
        required = "abstractmethod" in _decorators(member.node)
        return (is_operator or not member.name.startswith("_")) and (member.text is not None or required)
    return not member.name.startswith("_")


def _member(member: Definition) -> str:
    """A list item."""
    node, kinds = member.node, []
    if isinstance(node, ast.FunctionDef):
        words = {"abstractmethod": "required", "property": "property", "staticmethod": "static"}
        kinds = [word for decorator, word in words.items() if decorator in _decorators(node)]
        returns = "" if node.returns is None else f": {ast.unparse(node.returns)}"
        code = f"{node.name}{returns}" if "property" in kinds else _signature(node)
    else:
        code = _attribute(node)
    begin = f"- **`{code}`**" + (f" ({', '.join(kinds)})" if kinds else "")
    return "\n\n".join(_text(member.text, "  ", f"{begin}: ")) if member.text else begin


def _decorators(node: ast.FunctionDef) -> set[str]:
    return {ast.unparse(one) for one in node.decorator_list}


def _attribute(node: Node) -> str:
    """Without ClassVar, which says where Python keeps a value, and without what no plugin names: Field, private defaults."""
    if not isinstance(node, ast.AnnAssign):
        return ast.unparse(node)
    kind = re.sub(r"^ClassVar\[(.*)\]$", r"\1", ast.unparse(node.annotation))
    value = "" if node.value is None else ast.unparse(node.value)
    if isinstance(node.value, ast.Call):
        value = _keywords(node.value).get("default", "")
    shows = value and not value.startswith("_")
    return f"{ast.unparse(node.target)}: {kind}" + (f" = {value}" if shows else "")


def _keywords(call: ast.expr | None) -> dict[str, str]:
    """The keyword arguments of a call: texts as they are, others as code."""
    found = call.keywords if isinstance(call, ast.Call) else []
    values = {str(word.arg): word.value for word in found}
    return {
        name: value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ast.unparse(value)
        for name, value in values.items()
    }


def _signature(node: ast.FunctionDef) -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return f"{node.name}({arguments}){returns}"


def _text(docstring: str | None, indent: str = "", first: str = "") -> Iterator[str]:
    """The paragraphs of a docstring, behind `first`."""
    for paragraph in re.split(r"\n\s*\n", docstring or ""):
        if paragraph.strip():
            yield _wrapped(paragraph, indent, first)
            first = indent


def _wrapped(text: str, indent: str = "", first: str = "") -> str:
    """Lines of at most 120 characters; a space in inline code ends none, unless the code is long."""
    text = re.sub(
        r"`[^`]+`",
        lambda code: code[0].replace(" ", "\0") if len(code[0]) < _LONG else code[0],
        first.lstrip() + " ".join(text.split()),
    )
    begin = first if not first.strip() else ""
    lines = textwrap.wrap(
        text, 120, initial_indent=begin, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    for line in lines[1:]:
        assert not re.match(r"\s*([*+#>|-]|\d+[.)]) ", line), f"this would begin a list: {line}"
    return "\n".join(lines).replace("\0", " ")


def example(path: str) -> str:
    """A file as the example of a page, without its docstring."""
    text = (ROOT / path).read_text()
    docstring = ast.parse(text).body[0]
    code = "\n".join(text.splitlines()[docstring.end_lineno :]).strip("\n")
    code = code.removeprefix("from __future__ import annotations\n").strip("\n")
    return f"<!-- example: {path} -->\n\n```python\n{code}\n```\n\n<!-- example: end -->"


def page(name: str) -> str:
    """A page with its examples as they should be."""
    text = (HOME / f"{name}.md").read_text()
    return re.sub(
        r"<!-- example: (plugins/\S+) -->.*?<!-- example: end -->",
        lambda found: example(found[1]),
        text,
        flags=re.DOTALL,
    )


if __name__ == "__main__":
    for name in PAGES:
        (HOME / f"{name}.md").write_text(page(name))
