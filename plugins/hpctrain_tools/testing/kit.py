"""The runs of one plugin, each made once, and what they show."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w

from hpctrain.api import Plugin
from hpctrain_tools.testing.jobs import JOB, MIDDLE, merged, placed
from hpctrain_tools.testing.ranks import Request, starter
from hpctrain_tools.testing.record import CLOSE, Record, first_difference

_REFUSED = 2
_KEPT: dict[str, Record] = {}
"""Records of runs without the plugin in question, which kits of one process share."""


@dataclass(frozen=True)
class Finding:
    """A promise that a plugin broke, and how it showed."""

    plugin: str
    slot: str
    promise: str
    found: str

    def __str__(self) -> str:
        return f"{self.slot} {self.plugin!r} breaks the promise: {self.promise}: {self.found}"


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


class EnoughError(Exception):
    """The first finding is all that is asked for."""


class Kit:
    """The job of a plugin, and the findings so far."""

    def __init__(
        self,
        plugin: type[Plugin],
        slot: str,
        job: Mapping[str, Any],
        ranks: Sequence[int],
        modules: Sequence[str],
        directory: Path,
        first: bool = False,
    ) -> None:
        """directory: for the runs. first: whether the first finding ends the examination."""
        self._first = first
        self.plugin, self.slot, self.ranks, self.modules = plugin, slot, tuple(ranks), tuple(modules)
        self.given = dict(job)
        own = self.given.get(slot)
        own = own.get(plugin.name) if slot == "parallelism" and isinstance(own, dict) else own
        options = own if isinstance(own, dict) else own[0] if isinstance(own, list) and own else {}
        key = {"precision": "mode", "activation_checkpointing": "mode", "checkpoint": "format"}.get(slot, "name")
        self.options = {name: value for name, value in options.items() if name not in (key, "size")}
        self.job = merged(JOB, {name: table for name, table in self.given.items() if name != slot})
        self.tables = placed(slot, plugin, self.options)
        self.findings: list[Finding] = []
        self.directory, self._number, self._own = directory, 0, dict[str, Record]()

    def breaks(self, promise: str, found: str) -> None:
        """Note a finding, once."""
        finding = Finding(self.plugin.name, self.slot, promise, found)
        if finding not in self.findings:
            self.findings.append(finding)
        if self._first:
            raise EnoughError

    def train(
        self, *tables: Mapping[str, Any], layout: Layout | None = None, then: Layout | None = None, own: bool = True
    ) -> Record:
        """A run of the job with the plugin in it, or without. then: it is ended in the middle, and goes on so."""
        layout = layout or Layout(1)
        used = merged(self.job, *([self.tables] if own else []), *tables)
        words = json.dumps(
            [used, layout.ranks, layout.tables, None if then is None else [then.ranks, then.tables]], sort_keys=True
        )
        records = self._own if own else _KEPT
        if words not in records:
            records[words] = self._train(used, layout, then, own)
        return records[words]

    def _train(self, used: Mapping[str, Any], layout: Layout, then: Layout | None, own: bool) -> Record:
        self._number += 1
        place = self.directory / f"{self._number:03}"
        place.mkdir()
        self._write(place, merged(used, layout.tables), MIDDLE if then else 0)
        code, screen = starter().run(Request(str(place), layout.ranks, tuple(sys.path)))
        if then is not None and code == 0:
            self._write(place, merged(used, then.tables), 0)
            code, screen = starter().run(Request(str(place), then.ranks, tuple(sys.path)))
        return Record.read(code, screen, place)

    def _write(self, place: Path, tables: Mapping[str, Any], stop: int) -> None:
        recorder = {
            "name": "record",
            "diverges": bool(getattr(self.plugin, "ranks_diverge", False)),
            "stop": stop,
        }
        if self.slot == "communicator":
            recorder["collectives"] = True
        hooks = [*tables.get("hook", []), recorder]
        plugins = {"load": [*self.modules]}
        whole = {**tables, "hook": hooks, "plugins": plugins}
        whole = {
            name: {key: value for key, value in table.items() if value is not None}
            if isinstance(table, dict)
            else table
            for name, table in whole.items()
        }
        (place / "job.toml").write_text(tomli_w.dumps(whole))

    def expect(
        self, promise: str, found: Record, expected: Record | None = None, tolerance: float = CLOSE, where: str = "",
        what: tuple[str, ...] = ("parameters", "row", "gradients", "evaluation"),
    ) -> bool:  # fmt: skip
        """Note that a run failed, what its ranks noted, or that it differs from another one. Whether it is as promised."""
        before = len(self.findings)
        if found.code == _REFUSED and where:
            return True  # a layout that it refuses in a sentence is none that it promises
        told = f"on {where}, " if where else ""
        if found.code != 0:
            self.breaks(promise, f"{told}the run ended: {found.ending}")
            return False
        for broken, how in found.notes:
            self.breaks(broken, f"{told}it {how}")
        if expected is not None and len(self.findings) == before:
            assert expected.code == 0, f"the kit's own run failed: {expected.screen}"
            difference = first_difference(found, expected, tolerance, what)
            if difference is not None:
                self.breaks(promise, f"{told}{difference}")
        return len(self.findings) == before
