"""The machine that a plan is for, by its name or from a file, and the sources of its figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import tomli
from pydantic import ValidationError

from hpctrain.base.errors import UsageError, reason
from hpctrain.job.machines import Machine, shipped_machines
from hpctrain.job.toml import LimitError, parse


def open_machine(name: str) -> Machine:
    """A shipped machine by its name, or the table [machine] of a TOML file. Raises UsageError."""
    tables = shipped_machines()
    if name.lower() in tables:
        return Machine.model_validate(tables[name.lower()])
    path = Path(name)
    try:
        table = parse(path.read_text())["machine"]
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError, LimitError, KeyError) as error:
        why = "it has no table [machine]" if isinstance(error, KeyError) else reason(error)
        raise UsageError(
            f"--machine {name}: expected one of {', '.join(tables)}, or a TOML file with a table [machine]: {why}"
        ) from None
    try:
        return Machine.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join(["[machine]", ".".join(map(str, first["loc"]))]).strip()
        raise UsageError(f"{path}: {where}: {first['msg']}, found {first['input']!r}") from None


def figure_sources(machine: Machine) -> Iterator[str]:
    """Sentences about the figures that a time depends on: which were measured, given, or guessed."""
    kinds: dict[str, list[str]] = {"measured": [], "from data sheets": [], "guessed": []}
    for name in ("flops", "bandwidth", "inside", "across", "efficiency", "latency", "launch", "overhead"):
        given = "from data sheets" if name in machine.model_fields_set and not machine.measured else "guessed"
        kinds["measured" if name in machine.measured else given].append(name)
    yield from (f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)
