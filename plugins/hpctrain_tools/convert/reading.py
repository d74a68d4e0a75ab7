"""Reads a configuration: JSON, JSON with comments and loose commas as Hjson allows them, which DeepSpeed reads, or YAML."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hpctrain.api import UsageError, reason
from hpctrain.base.safe_files import read_bytes
from hpctrain.toolkit.commands import escaped

_MOST_BYTES = 2**22
# texts, and comments outside of them
_LOOSE = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')|(?P<comment>(?:(?<![^\s,{\[\]}])(?://|\#)[^\n]*)|/\*.*?\*/)""",
    re.DOTALL,
)
_EXTRA = re.compile(r"""("(?:\\.|[^"\\\n])*")|,(?=\s*[}\]])""")
_MISSING = re.compile(r"""(?<=[^\s{\[,:])[ \t]*\n(?=\s*[^\s}\],])""")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
# keys whose values stay texts
_TEXTS = ("project", "group", "team", "job_name", "output_path")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Refuses aliases, which a few lines grow to gigabytes with, and keys that are there twice."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias (*name); write the value out")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        _once([(str(key.value), None) for key, _ in node.value])
        return super().construct_mapping(node, deep=True)


class _RepeatedError(ValueError):
    """A key is there twice."""


def read(path: Path) -> Mapping[str, Any]:
    """The tables of a file, with texts of numbers and of truth values as these. Raises UsageError for anything else."""
    try:
        found = _parsed(read_bytes(Path(os.path.realpath(path)), _MOST_BYTES).decode())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        kind = "" if isinstance(error, _RepeatedError) else "is neither JSON, Hjson nor YAML: "
        raise UsageError(f"{path} {kind}{' '.join(str(error).split())}") from None
    if not isinstance(found, Mapping):
        raise UsageError(f"{path} holds {type(found).__name__}, expected a table of keys")
    typed: Mapping[str, Any] = _typed("", found)
    return typed


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except _RepeatedError:
        raise
    except ValueError:
        plain = _LOOSE.sub(lambda match: match["text"] or "", text)
    if plain.lstrip().startswith("{"):
        text = _EXTRA.sub(lambda match: match[1] or "", _MISSING.sub(",\n", plain))
    return yaml.load(text, _Loader)


def _once(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _RepeatedError(f"has the key {escaped(str(key))!r} twice; expected it once")
        found[str(key)] = value
    return found


def _typed(key: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _typed(str(name), one) for name, one in value.items()}
    if isinstance(value, list):
        return [_typed(key, one) for one in value]
    if not isinstance(value, str) or key in _TEXTS:
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return (int(value) if re.fullmatch(r"[+-]?\d+", value) else float(value)) if _NUMBER.fullmatch(value) else value
