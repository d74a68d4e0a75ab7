"""Asks what became of the submissions of a run: its scheduler, with the options of the job that was submitted.

The directory may be another person's: no code that its job names is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from pydantic import ValidationError

from hpctrain.base.errors import UsageError, reason, shown
from hpctrain.base.safe_files import read_bytes
from hpctrain.contracts.plugin import broken
from hpctrain.contracts.scheduler import JOB_FILE, RECORD, JobState, Scheduler
from hpctrain.job.problems import validate
from hpctrain.job.rank_tables import SchedulerTable
from hpctrain.job.raw import RawJob
from hpctrain.job.toml import parse
from hpctrain.starting.scheduler.record import Submission, cancelled, newest
from hpctrain.starting.scheduler.standing import last_row

if TYPE_CHECKING:
    from hpctrain.plugins.registry import Registry

_WORDS = get_args(get_type_hints(JobState)["word"])


@dataclass(frozen=True)
class Submitted:
    """A run's newest submission."""

    directory: Path
    submission: Submission
    load: tuple[str, ...] = ()
    """Modules with schedulers, besides the installed ones."""

    def __str__(self) -> str:
        return f"{self.submission.target} job {self.submission.id}"

    def state(self) -> JobState:
        """How the scheduler says it is."""
        with self._scheduler() as scheduler:
            state = scheduler.state(self.submission.id)
            if not isinstance(state, JobState) or state.word not in _WORDS:
                raise broken(
                    scheduler, f"gave the state {shown(state)}", f"a JobState whose word is one of {', '.join(_WORDS)}"
                )
            return state

    def cancel(self) -> None:
        """End it; its ranks don't ask to be started again."""
        with self._scheduler() as scheduler, cancelled(self.directory):
            scheduler.cancel(self.submission.id, self.directory.absolute())

    def progress(self) -> str:
        """ "step 17 of 40"; empty before the first step."""
        step = (last_row(self.directory / "metrics.jsonl") or {}).get("step")
        job = self._tables().get("job")
        steps = job.get("steps") if isinstance(job, dict) else None
        return "" if step is None else f"step {step}" + (f" of {steps}" if isinstance(steps, int) else "")

    def _tables(self) -> dict[str, Any]:
        """The job that was submitted. Raises UsageError."""
        path = self.directory / JOB_FILE
        try:
            return RawJob(parse(read_bytes(path).decode())).tables
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {reason(error)}; submit the job again") from None

    @contextmanager
    def _scheduler(self) -> Iterator[Scheduler]:
        from hpctrain.plugins.registry import build_registry  # here: with the plugins it imports torch

        plugins = self._tables().get("plugins")
        lists = [plugins.get(key) if isinstance(plugins, dict) else None for key in ("block", "prefer")]
        block, prefer = (
            [one for one in names if isinstance(one, str)] if isinstance(names, list) else [] for names in lists
        )
        registry = build_registry(self.load, block, prefer)
        with blamed(registry):
            yield self._made(registry)

    def _made(self, registry: Registry) -> Scheduler:
        target = self.submission.target
        entry, tables = registry.find("scheduler", target), self._tables().get("scheduler")
        table = tables.get(target) if isinstance(tables, dict) else None
        own = (
            {k: v for k, v in table.items() if k not in SchedulerTable.model_fields} if isinstance(table, dict) else {}
        )
        try:
            scheduler: Scheduler = registry.make(entry.cls, validate(entry.cls.Options, own))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise UsageError(
                f"{self.directory / JOB_FILE}: [scheduler.{target}] does not fit the installed plugin: {wrong}"
            ) from None
        return scheduler


@contextmanager
def blamed(registry: Registry) -> Iterator[None]:
    """Errors of a scheduler of somebody else's become a sentence with its name."""
    try:
        yield
    except Exception as error:
        from hpctrain.plugins.blame import retell_plugin_error

        retell_plugin_error(error, registry)
        raise


def submitted(directory: Path, load: tuple[str, ...] = ()) -> list[Submitted]:
    """The newest submission of the run in `directory`, or of each run of the array in it. Raises UsageError if there is none."""
    found = newest(directory)
    if found is None:
        what = "no directory" if not directory.is_dir() else f"no {RECORD} in it"
        raise UsageError(f"{directory}: found {what}, expected the directory of a run that `hpctrain submit` submitted")
    if not found.runs:
        return [Submitted(directory, found, load)]
    runs = [
        Submitted(directory / name, one, load) for name in found.runs if (one := newest(directory / name)) is not None
    ]
    if len(runs) < len(found.runs) or any(one.submission.runs for one in runs):
        raise UsageError(f"{directory}: found an array with runs that are gone; expected {', '.join(found.runs)} in it")
    return runs
