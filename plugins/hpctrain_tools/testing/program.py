"""A program with its own loop as `hpctrain prove` runs it: for a few steps, on a layout, recorded."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import tomli

import hpctrain
from hpctrain.api import Job, UsageError
from hpctrain.own_loops.jobs import job_tables
from hpctrain.ranks.detection import detect
from hpctrain_tools.testing.runs import merged, shortened


def run_program(on_top: Path, words: Sequence[str]) -> None:
    """Run the program `words` on this rank, as `python` does. on_top: a file of tables on top of those of its job."""
    loops: list[Any] = []
    tables_on_top, theirs = tomli.loads(on_top.read_text()), hpctrain.own_loop

    def own_loop(
        job: Job | Mapping[str, Any] | str | Path, /, resume: str = "auto", **tables: Mapping[str, Any]
    ) -> AbstractContextManager[Any]:
        if loops:
            raise UsageError("prove: the program begins a second own_loop; expected one")
        whole = job_tables(job, tables, detect().size)
        found = merged(shortened(whole), tables_on_top, {"hook": [*whole.get("hook", []), *tables_on_top["hook"]]})
        loops.append(theirs(found))
        return loops[0]  # type: ignore[no-any-return]

    hpctrain.own_loop = own_loop  # type: ignore[assignment]
    sys.argv[:] = words
    sys.path.insert(0, str(Path(words[0]).parent.resolve()))
    runpy.run_path(words[0], run_name="__main__")
    if not loops:
        raise UsageError(f"prove: {words[0]} ends without hpctrain.own_loop; expected a program with a loop of its own")
