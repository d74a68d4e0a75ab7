"""The runs of one plugin, each made once, and what they show."""

from __future__ import annotations

import atexit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from hpctrain.api import Plugin
from hpctrain.base.errors import EXIT_USAGE
from hpctrain.base.safe_files import scratch_directory
from hpctrain.registry.slots import SLOTS
from hpctrain_tools.testing.jobs import JOB, placed, usual_options
from hpctrain_tools.testing.record import CLOSE, Record, first_difference
from hpctrain_tools.testing.runs import MIDDLE, Layout, Runs, merged


@dataclass(frozen=True)
class Finding:
    """A promise that a plugin broke, and how it showed."""

    plugin: str
    slot: str
    promise: str
    found: str

    def __str__(self) -> str:
        return f"{self.slot} {self.plugin!r} breaks the promise: {self.promise}: {self.found}"


class EnoughError(BaseException):
    """The first finding is all that is asked for: no error, which code may suppress."""


@cache
def _runs_without() -> Runs:
    """Runs without the plugin in question, which the kits of a process share."""
    kept = ExitStack()
    atexit.register(kept.close)
    return Runs(kept.enter_context(scratch_directory("kit-")))


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
        self.options = {name: value for name, value in options.items() if name not in (SLOTS[slot].key, "size")}
        self.job = merged(JOB, {name: table for name, table in self.given.items() if name != slot})
        self.tables = placed(slot, plugin, self.options)
        self.findings: list[Finding] = []
        self.directory, self._runs = directory, Runs(directory)

    def valid_options(self, **others: Any) -> Any:
        """The options of the kit's job, as the plugin gets them. others: in place of those. Raises ValidationError."""
        known = self.plugin.Options.model_fields
        given = {**usual_options(self.slot, self.plugin), **self.options, **others}
        return self.plugin.Options(**{key: value for key, value in given.items() if key in known})

    def made(self, **others: Any) -> Any:
        """The plugin with these options."""
        return self.plugin(self.valid_options(**others))

    def varied(self) -> Iterator[tuple[str, Any]]:
        """Each option with a number, a flag or a choice, and another value that the plugin takes for it."""
        for key, now in dict(self.valid_options()).items():
            others: list[Any] = [
                one for one in get_args(self.plugin.Options.model_fields[key].annotation) if one != now
            ]
            if isinstance(now, bool):
                others = [not now]
            elif isinstance(now, (int, float)):
                others = [now + 1, now / 2 if isinstance(now, float) else now - 1]
            for other in others:
                try:
                    self.valid_options(**{key: other})
                except ValidationError:
                    continue
                yield key, other
                break

    def others(self) -> dict[str, Any]:
        """Tables of another job with the plugin: other options, another seed and another rate."""
        tables = placed(self.slot, self.plugin, {**self.options, **dict(self.varied())})
        of_job = {"job": {"seed": self.job["job"]["seed"] + 1}, "optimizer": {"clip_norm": 0.7}}
        return merged(of_job, tables)

    def breaks(self, promise: str, found: str) -> None:
        """Note a finding, once."""
        finding = Finding(self.plugin.name, self.slot, promise, found)
        if finding not in self.findings:
            self.findings.append(finding)
        if self._first:
            raise EnoughError

    def train(
        self,
        *tables: Mapping[str, Any],
        layout: Layout | None = None,
        then: Layout | None = None,
        own: bool = True,
        middle: int = MIDDLE,
        behind: Mapping[str, Any] | None = None,
    ) -> Record:
        """A run of the job with the plugin in it, or without. then: it is ended after step `middle`, and goes on so.
        behind: tables of another job that the process runs before, which need not succeed."""
        used = merged(self.job, *([self.tables] if own else []), *tables)
        options = {
            "diverges": bool(getattr(self.plugin, "ranks_diverge", False)),
            "collectives": self.slot == "communicator",
            "keeps": self.slot == "checkpoint",
            "leaves": self.slot == "profile",
        }
        if own:
            used["plugins"] = {"load": [*self.modules]}
        before = None if behind is None else merged(used, behind)
        return (self._runs if own else _runs_without()).train(used, layout or Layout(1), then, options, before, middle)

    def expect(
        self, promise: str, found: Record, expected: Record | None = None, tolerance: float = CLOSE, where: str = "",
        what: tuple[str, ...] = ("parameters", "row", "gradients", "evaluation"),
    ) -> bool:  # fmt: skip
        """Note that a run failed, what its ranks noted, or that it differs from another one. Whether it is as promised."""
        before = len(self.findings)
        if found.code == EXIT_USAGE and where:
            return True  # a layout that it refuses in a sentence is none that it promises
        told = f"on {where}, " if where else ""
        for broken, how in found.notes:
            self.breaks(broken, f"{told}it {how}")
        if found.code != 0:
            self.breaks(promise, f"{told}the run ended: {found.ending}")
            return False
        if expected is not None and len(self.findings) == before:
            assert expected.code == 0, f"the kit's own run failed: {expected.screen}"
            difference = first_difference(found, expected, tolerance, what)
            if difference is not None:
                self.breaks(promise, f"{told}{difference}")
        return len(self.findings) == before
