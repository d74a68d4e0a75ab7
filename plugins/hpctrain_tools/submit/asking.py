"""Asks what became of the submissions of a run: its scheduler, with the options of the job that was submitted.

The directory may be another person's: no code that its job names is loaded.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from pydantic import ValidationError

from hpctrain.base.errors import HpctrainError, UsageError, reason, shown
from hpctrain.base.safe_files import is_only_ours, read_bytes
from hpctrain.contracts.plugin import broken
from hpctrain.contracts.scheduler import JOB_FILE, RECORD, JobState, Scheduler
from hpctrain.job.problems import validate
from hpctrain.job.raw import RawJob
from hpctrain.job.tables import SchedulerTable
from hpctrain.job.toml import parse
from hpctrain_tools.submit.record import Submission, cancelled, newest

if TYPE_CHECKING:
    from hpctrain.registry.registry import Registry

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
        with self.scheduler() as scheduler:
            found = _kept(scheduler, scheduler.state(self.submission.id))
        if found.word == "unknown" and not self._is_ours():
            return JobState(
                "unknown", f"{found.detail}; asked without the options of {JOB_FILE}, which others can write"
            )
        return found

    def cancel(self) -> None:
        """End it; its ranks don't ask to be started again."""
        with self.scheduler() as scheduler, cancelled(self.directory):
            scheduler.cancel(self.submission.id, self.directory.absolute())

    def _tables(self) -> dict[str, Any]:
        """The job that was submitted. Raises UsageError."""
        path = self.directory / JOB_FILE
        try:
            return RawJob(parse(read_bytes(path).decode())).tables
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {reason(error)}; submit the job again") from None

    def _is_ours(self) -> bool:
        """Whether nobody else can have written which scheduler was asked, and how."""
        directory, file = self.directory.lstat(), (self.directory / JOB_FILE).lstat()
        is_apart = (
            not directory.st_mode & 0o077 and file.st_uid == os.geteuid()
        )  # whatever the umask has made of the file
        return is_only_ours(directory) and (is_apart or is_only_ours(file))

    @contextmanager
    def scheduler(self) -> Iterator[Scheduler]:
        """The scheduler. Its errors become sentences."""
        from hpctrain.registry.registry import build_registry  # here: with the plugins it imports torch

        registry = build_registry(self.load, self.choice()[1])
        with blamed(registry):
            yield self._made(registry)

    def choice(self) -> tuple[dict[str, Any], list[str]]:
        """The keys of the job that make its scheduler: the target's own options and [plugins] block. Raises UsageError."""
        tables = self._tables()
        if not self._is_ours():  # its options could name another person's cluster, whose answers may be code
            return {}, []
        plugins, targets = tables.get("plugins"), tables.get("scheduler")
        names = plugins.get("block") if isinstance(plugins, dict) else None
        block = [one for one in names if isinstance(one, str)] if isinstance(names, list) else []
        table = targets.get(self.submission.target) if isinstance(targets, dict) else None
        own = (
            {k: v for k, v in table.items() if k not in SchedulerTable.model_fields} if isinstance(table, dict) else {}
        )
        return own, block

    def _made(self, registry: Registry) -> Scheduler:
        target = self.submission.target
        entry, own = registry.find("scheduler", target), self.choice()[0]
        try:
            scheduler: Scheduler = registry.make(entry.cls, validate(entry.cls.Options, own))
        except ValidationError as error:
            wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            if not self._is_ours():
                raise UsageError(
                    f"{self.directory}: others can write there, so that the options of its [scheduler.{target}] are not used, and "
                    f"it needs some ({wrong}); ask as the run's owner, after `chmod go-w` of the directory and its {JOB_FILE}"
                ) from None
            raise UsageError(
                f"{self.directory / JOB_FILE}: [scheduler.{target}] does not fit the installed plugin: {wrong}"
            ) from None
        return scheduler


def _kept(scheduler: Scheduler, state: object) -> JobState:
    """The state that a scheduler gave. Raises ContractError for anything else."""
    if not isinstance(state, JobState) or state.word not in _WORDS:
        raise broken(
            scheduler, f"gave the state {shown(state)}", f"a JobState whose word is one of {', '.join(_WORDS)}"
        )
    return state


@dataclass
class Answers:
    """The schedulers' answers about many runs. complaints: why some are missing."""

    states: dict[Path, JobState] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)


def ask_about(runs: Sequence[Submitted], seconds: float) -> Answers:
    """Ask each scheduler once about all of its jobs; where it takes one at a time, about as many as `seconds` allow."""
    answers, groups = Answers(), dict[str, list[Submitted]]()
    for one in runs:
        try:
            groups.setdefault(json.dumps([one.submission.target, one.choice()], default=str), []).append(one)
        except UsageError as error:
            answers.complaints.append(str(error))
    until = time.monotonic() + seconds
    for group in groups.values():
        ids = [one.submission.id for one in group]
        target = group[0].submission.target
        try:
            with group[0].scheduler() as scheduler:
                found = _states(scheduler, ids, until)
        except HpctrainError as error:
            answers.complaints.append(f"{target} cannot be asked about {len(ids)} job{'s' * (len(ids) > 1)}: {error}")
            continue
        answers.states |= {one.directory: found[one.submission.id] for one in group if one.submission.id in found}
        if len(found) < len(ids):
            answers.complaints.append(
                f"{target} was asked about {len(found)} of {len(ids)} jobs within {seconds:.0f} s"
            )
    return answers


def _states(scheduler: Scheduler, ids: Sequence[str], until: float) -> Mapping[str, JobState]:
    """The states of jobs; those that the scheduler has forgotten are "unknown", those it was not asked about are absent."""
    if type(scheduler).states is not Scheduler.states:
        told = scheduler.states(ids)
        return {id: _kept(scheduler, told.get(id, JobState("unknown"))) for id in ids}
    found: dict[str, JobState] = {}
    for id in ids:
        if found and time.monotonic() > until:
            break
        found[id] = _kept(scheduler, scheduler.state(id))
    return found


@contextmanager
def blamed(registry: Registry) -> Iterator[None]:
    """Errors of a scheduler of somebody else's become a sentence with its name."""
    try:
        yield
    except Exception as error:
        from hpctrain.registry.blame import retell_plugin_error

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
