"""Runs of small jobs, each made once: on a layout, or ended in the middle and resumed on another one."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from hpctrain.job.tables import CheckpointTable
from hpctrain_tools.testing.ranks import Request, starter
from hpctrain_tools.testing.record import Record
from hpctrain_tools.testing.twice import run_behind_another

STEPS = 8
"""Optimizer steps of a run."""
MIDDLE = 4
"""The step after which a run is ended and resumed."""
# tables that have no part in what is compared
_LEFT_OUT = ("logger", "scheduler", "profile")


@dataclass(frozen=True)
class Layout:
    """A number of ranks, and the tables that lay a job out on them."""

    ranks: int
    tables: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [
            f"[{table}] {key} = {json.dumps(value)}" for table, of in self.tables.items() for key, value in of.items()
        ]
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}" + (f" with {', '.join(words)}" if words else "")


class Runs:
    """The runs below a directory."""

    def __init__(
        self, directory: Path, here: Path | None = None, seconds: float = 120.0, program: Sequence[str] = ()
    ) -> None:
        """here: the current directory of the runs, if it is not that of each. seconds: the limit of one. program: the words of one
        with a loop of its own, for whose job the tables are laid on top."""
        self.directory, self._here, self._seconds, self._program = directory, here, seconds, tuple(program)
        self._kept: dict[str, Record] = {}

    def train(
        self,
        tables: Mapping[str, Any],
        layout: Layout,
        then: Layout | None = None,
        options: Mapping[str, Any] | None = None,
        before: Mapping[str, Any] | None = None,
        middle: int = MIDDLE,
    ) -> Record:
        """The run of a job on `layout`. then: it is ended after step `middle`, and goes on so. options: of the hook
        `record`. before: the job that a new process runs first, on one rank."""
        after = None if then is None else [then.ranks, then.tables]
        words = json.dumps([tables, layout.ranks, layout.tables, after, options, before, middle], sort_keys=True)
        if words not in self._kept:
            place = self.directory / f"{len(self._kept):03}"
            place.mkdir()
            told = dict(options or {})
            if before is not None:
                self._write(place / "before.toml", before, {"output_dir": str(place / "before")})
            code, screen = self._run(
                place, merged(tables, layout.tables), layout.ranks, {**told, "stop": middle if then else 0}
            )
            if then is not None and code == 0:
                code, screen = self._run(place, merged(tables, then.tables), then.ranks, told)
            self._kept[words] = Record.read(code, screen, place)
        return self._kept[words]

    def _run(self, place: Path, tables: Mapping[str, Any], ranks: int, options: Mapping[str, Any]) -> tuple[int, str]:
        recorded = {**tables, "hook": [*tables.get("hook", []), {"name": "record", **options}]}
        self._write(place / "job.toml", recorded, {"output_dir": str(place / "out")})
        if (place / "before.toml").exists():
            return run_behind_another(place, self._seconds)
        here = self._here or place
        return starter().run(Request(str(place), str(here), ranks, tuple(sys.path), self._seconds, self._program))

    @staticmethod
    def _write(path: Path, tables: Mapping[str, Any], of_job: Mapping[str, Any]) -> None:
        whole = merged(tables, {"job": of_job})
        path.write_text(
            tomli_w.dumps(
                {name: without_unset(table) if isinstance(table, dict) else table for name, table in whole.items()}
            )
        )


def shortened(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a user's job for STEPS steps, with two evaluations and two saves."""
    kept = {name: table for name, table in tables.items() if name not in _LEFT_OUT}
    keeping = [key for key in CheckpointTable.model_fields if key.startswith("keep")]
    small = {
        "job": {"steps": STEPS, "epochs": None, "output_dir": None},
        "checkpoint": {"every_steps": MIDDLE, "every_epochs": None, **dict.fromkeys(keeping), "keep": 3},
    }
    if kept.get("evaluation"):
        small["evaluation"] = {"every_steps": MIDDLE, "every_epochs": None}
    found = merged(kept, small)
    return {name: without_unset(table) if isinstance(table, Mapping) else table for name, table in found.items()}


def without_unset(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table without keys that were taken out, whose value is None."""
    return {key: value for key, value in table.items() if value is not None}


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Job tables, the later ones on top of the earlier. A table that names another plugin replaces the one before."""
    found: dict[str, Any] = {}
    for one in tables:
        for name, table in one.items():
            before = found.get(name)
            if not isinstance(before, dict) or not isinstance(table, dict) or _is_of_another(before, table):
                found[name] = table
            else:
                found[name] = {**before, **table}
    return found


def _is_of_another(before: Mapping[str, Any], table: Mapping[str, Any]) -> bool:
    return bool(table.get("name", before.get("name")) != before.get("name")) and "name" in before
