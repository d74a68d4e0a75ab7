"""Makes checked jobs, and a scheduler's orders, from the command line of `hpctrain submit`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import ValidationError

from hpctrain.base.child_python import python_module
from hpctrain.base.errors import UsageError
from hpctrain.checking.check import CheckedJob
from hpctrain.checking.resolved import resolved_tables
from hpctrain.contracts.scheduler import JOB_FILE, Launch, Scheduler, SubmittedRun
from hpctrain.job.environment import READ_BY_MPIEXEC
from hpctrain.job.problems import validate
from hpctrain.job.raw import RawJob
from hpctrain.job.reading import read_job
from hpctrain.job.tables import SchedulerTable
from hpctrain_tools.full_check import check_thoroughly
from hpctrain_tools.launch.mpi_library import MPICH, OPEN_MPI, ask_library
from hpctrain_tools.submit.sweep import Variant, variants

_LONGEST_NAME = 60


@dataclass(frozen=True)
class SubmitOptions:
    """The command line. given: the options that stand for keys of [scheduler.TARGET]."""

    job: Path
    overrides: tuple[str, ...]
    to: str | None
    given: Mapping[str, Any]
    array: str | None


@dataclass(frozen=True)
class Prepared:
    """The checked jobs, one for each run. directory: the run's, or the one above an array's runs; absolute."""

    target: str
    checked: list[CheckedJob]
    directory: Path

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler with its options. An array can't vary them."""
        return self.checked[0].parts.scheduler[self.target]

    @property
    def load(self) -> tuple[str, ...]:
        """The modules that the job loads as plugins."""
        return tuple(self.checked[0].job.plugins.load)

    def launches(self, after: tuple[str, ...]) -> list[Launch]:
        """The scheduler's orders: all runs at once if it takes arrays, else each by itself."""
        runs = tuple(_run_of(one) for one in self.checked)
        first, table = self.checked[0].job, self.checked[0].job.scheduler[self.target]
        name = re.sub(r"[^A-Za-z0-9._-]", "-", first.job.name)[:_LONGEST_NAME]
        library = ask_library()
        common: dict[str, Any] = {
            "working_directory": Path.cwd(),
            "nodes": table.nodes, "ranks_per_node": table.ranks_per_node, "cpus_per_rank": table.cpus_per_rank,
            "seconds": table.seconds, "save_seconds": table.save_seconds,
            "program": tuple(python_module("hpctrain")),
            "mpi": None if library is None else OPEN_MPI if library.flavour == OPEN_MPI else MPICH,
            "after": after,
        }  # fmt: skip
        if len(runs) == 1 or self.scheduler.takes_arrays:
            environment = _of_mpiexec(self.checked[0])
            return [Launch(name=name, directory=self.directory, runs=runs, environment=environment, **common)]
        return [
            Launch(
                name=f"{name}-{number}",
                directory=run.directory,
                runs=(run,),
                environment=_of_mpiexec(checked),
                **common,
            )
            for number, (run, checked) in enumerate(zip(runs, self.checked, strict=True))
        ]


def prepare(request: SubmitOptions) -> Prepared:
    """Check the job of each run as `hpctrain check` does. Raises JobError, UsageError."""
    target = request.to or _only_target(read_job(request.job, request.overrides))
    runs: Sequence[Variant | None] = [None] if request.array is None else variants(request.array)
    checked = [_checked(request, target, variant) for variant in runs]
    directory = checked[0].job.output_dir.absolute()
    return Prepared(target, checked, directory if request.array is None else directory.parent)


def _only_target(raw: RawJob) -> str:
    tables = raw.tables.get("scheduler")
    names = list(tables) if isinstance(tables, dict) else []
    if len(names) == 1:
        return str(names[0])
    found = f"[scheduler] has {', '.join(names)}" if names else "the job has no table such as [scheduler.slurm]"
    raise UsageError(f"{raw.source}: {found}; say where to submit it, for instance --to slurm")


def _checked(request: SubmitOptions, target: str, variant: Variant | None) -> CheckedJob:
    raw = read_job(request.job, request.overrides)
    _give(raw, target, request)
    job = raw.tables.get("job")
    if variant is not None:
        changed = read_job(request.job, [*request.overrides, variant.override])
        _give(changed, target, request)
        if isinstance(job, dict) and isinstance(job.get("name"), str):
            above = job.get("output_dir") or f"runs/{job['name']}"
            changed.tables["job"]["output_dir"] = str(Path(str(above)) / variant.label)
        raw = changed
    return check_thoroughly(raw, _ranks(raw, target))[0]


def _give(raw: RawJob, target: str, request: SubmitOptions) -> None:
    """Put the command line's options into [scheduler.TARGET]. A table of a wrong type stays, for the check to report."""
    tables = raw.tables.setdefault("scheduler", {})
    table = tables.setdefault(target, {}) if isinstance(tables, dict) else None
    if not isinstance(table, dict):
        return
    if request.to is not None:
        raw.places.setdefault(("scheduler", target), f"--to {target}")
    for key, value in request.given.items():
        table[key] = value
        raw.places["scheduler", target, key] = f"--{key.replace('_', '-')} {value}"


def _ranks(raw: RawJob, target: str) -> int | None:
    """The number of ranks; None if the table is wrong, which the check reports."""
    try:
        table = validate(SchedulerTable, raw.tables["scheduler"][target])
    except (ValidationError, TypeError):
        return None
    assert isinstance(table, SchedulerTable)
    return table.nodes * table.ranks_per_node


def _of_mpiexec(checked: CheckedJob) -> dict[str, str]:
    return {name: text for name, text in checked.job.environment.items() if name.startswith(READ_BY_MPIEXEC)}


def _run_of(checked: CheckedJob) -> SubmittedRun:
    directory = checked.job.output_dir.absolute()
    text = f"# The job as submitted, with every key.\n{tomli_w.dumps(resolved_tables(checked))}"
    return SubmittedRun(directory, directory / JOB_FILE, text)
