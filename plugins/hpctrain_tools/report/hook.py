"""Writes the report of the run at its end, also of one that fails."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from hpctrain.api import Field, Hook, Identity, Job, Options, Plan, Problem, created, hookimpl, replacing
from hpctrain_tools.report.facts import Ending
from hpctrain_tools.report.gathering import failed, gather
from hpctrain_tools.report.pages import FILE_NAME, text_of
from hpctrain_tools.runs import OF_ANOTHER, Failure, find_failure, read_starts

LOG = logging.getLogger("hpctrain")


class ReportOptions(Options):
    limit_seconds: float = Field(
        default=30.0, gt=0, le=3600, description="the end of the run waits no longer for the report"
    )


class Report(Hook):
    """Writes report.html into the run's directory, at the end of the job and after an error."""

    name = "report"
    Options = ReportOptions
    options: ReportOptions

    def problems(self, plan: Plan) -> list[Problem]:
        if importlib.util.find_spec("matplotlib") is not None:
            return []
        return [
            Problem("the package matplotlib is not installed; pip install 'hpctrain[plots]', or leave this hook out")
        ]

    def start(self) -> _Writing:
        return _Writing(self.options.limit_seconds)


class _Writing:
    """Nothing here communicates, and no error leaves it: what the run says at its end is more important."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit, self._rank = limit_seconds, 0
        # none before the start
        self._directory: Path | None = None

    @hookimpl
    def hpctrain_job_start(self, job: Job, identity: Identity) -> None:
        self._directory, self._rank = job.output_dir, identity.rank

    @hookimpl
    def hpctrain_job_end(self, result: Mapping[str, Any]) -> None:
        if self._rank == 0:
            self._write(lambda _: Ending("stopped" if result["exit_code"] else "done"))

    @hookimpl
    def hpctrain_exception(self, exception: BaseException, identity: Identity) -> None:
        """The rank that fails writes, since rank 0 may wait for it and be ended by it."""
        mine = type(exception).__name__, str(exception), datetime.now().astimezone()
        if self._rank and mine[0] == OF_ANOTHER:
            return

        def ending(directory: Path) -> Ending:
            """The error that came first: this rank's may follow from another rank's."""
            log = directory / "log" / f"rank-{identity.rank:05d}.log"
            return failed(find_failure(directory) or Failure(identity.rank, *mine, log))

        self._write(ending)

    def _write(self, ending: Callable[[Path], Ending]) -> None:
        """Write the page on a thread, which is left alone after the limit."""
        directory = self._directory
        if directory is None:
            return
        thread = threading.Thread(target=_written, args=(directory, ending), name="report", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no memory for a thread
            LOG.warning("the report is not written: %s", error)
            return
        thread.join(self._limit)
        if thread.is_alive():
            LOG.warning(
                "the report is not written: it takes longer than %g s; hpctrain report %s", self._limit, directory
            )


def _written(directory: Path, ending: Callable[[Path], Ending]) -> None:
    try:
        with _claimed(directory) as is_mine:
            if is_mine:
                text = text_of([gather(directory, ending(directory))], "html")
                with replacing(directory / FILE_NAME) as file:
                    file.write(text.encode(errors="replace"))
                LOG.info("report       %s", directory / FILE_NAME)
    except Exception as error:
        LOG.warning("the report is not written: %s: %s", type(error).__name__, error)
        LOG.info("where the report failed", exc_info=error)


@contextmanager
def _claimed(directory: Path) -> Iterator[bool]:
    """Whether no other rank of this start is writing: all may fail at once."""
    starts = read_starts(directory).starts
    path = directory / f".{FILE_NAME}.{starts[-1].time if starts else 0:.3f}.tmp"
    try:
        with created(path):
            pass
    except FileExistsError:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [Report]
