"""--array KEY=V1,V2,...: one run for each value."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from hpctrain.base.errors import UsageError
from hpctrain.job.toml import parse

# characters of a directory's name; file systems allow 255 bytes
_LONGEST = 100


@dataclass(frozen=True)
class Variant:
    """override: as for --set. label: the name of the run's directory, below that of the array."""

    override: str
    label: str


def variants(array: str) -> list[Variant]:
    """The runs of `array`. Values are TOML, or else texts between commas. Raises UsageError."""
    key, equals, text = array.partition("=")
    if not equals or not key.strip() or not text.strip():
        raise UsageError(f"--array {array}: expected KEY=V1,V2,... such as optimizer.lr=0.1,0.01")
    key = key.strip()
    if key in ("job.output_dir", "job.name") or key.partition(".")[0] == "scheduler":
        raise UsageError(
            f"--array {array}: found {key}, expected a key of the training: the runs are submitted alike, each in a directory of "
            "its own below the job's"
        )
    found = [Variant(f"{key}={value}", _label(key, value)) for value in _values(text)]
    labels = [one.label for one in found]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if len(found) < 2 or twice is not None or any(one.override == f"{key}=" for one in found):
        what = f"two runs named {twice}" if twice else "an empty value" if len(found) > 1 else "one value"
        raise UsageError(
            f"--array {array}: found {what}, expected two or more different values with commas between them"
        )
    return found


def _values(text: str) -> list[str]:
    try:
        return [json.dumps(value) for value in parse(f"values = [{text}]")["values"]]
    except (ValueError, TypeError, KeyError):
        return [value.strip() for value in text.split(",")]


def _label(key: str, value: str) -> str:
    plain = value[1:-1] if value[:1] == '"' else value
    return re.sub(r"[^\w.=+-]+", "_", f"{key}={plain}")[:_LONGEST]
