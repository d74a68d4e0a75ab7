"""Writes the report of the run at its end, also of one that fails."""

from __future__ import annotations

import importlib.util
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from hpctrain.api import Field, Hook, Identity, Job, Options, Plan, Problem, hookimpl, replacing
from hpctrain.toolkit.runs import Failure, find_failure
from hpctrain_plugins.report.facts import Ending
from hpctrain_plugins.report.gathering import failed, gather
from hpctrain_plugins.report.pages import FILE_NAME, text_of

LOG = logging.getLogger("hpctrain")


class ReportOptions(Options):
    limit_seconds: float = Field(
        default=30.0, gt=0, le=3600, description="the end of the run waits no longer for the report"
    )


class Report(Hook):
    """Writes report.html into the run's directory on rank 0, at the end of the job and after an error."""

    name = "report"
    Options = ReportOptions
    options: ReportOptions

    def problems(self, plan: Plan) -> list[Problem]:
        if importlib.util.find_spec("matplotlib") is not None:
            return []
        return [
            Problem("the package matplotlib is not installed; pip install 'hpctrain[report]', or leave this hook out")
        ]

    def start(self) -> _Writing:
        return _Writing(self.options.limit_seconds)


class _Writing:
    """Nothing here communicates, and no error leaves it: what the run says at its end is more important."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._directory: Path | None = None
        """None on other ranks than 0, and before the start."""

    @hookimpl
    def hpctrain_job_start(self, job: Job, identity: Identity) -> None:
        self._directory = job.output_dir if identity.rank == 0 else None

    @hookimpl
    def hpctrain_job_end(self, result: Mapping[str, Any]) -> None:
        self._write(lambda _: Ending("stopped" if result["exit_code"] else "done"))

    @hookimpl
    def hpctrain_exception(self, exception: BaseException, identity: Identity) -> None:
        mine = type(exception).__name__, str(exception), datetime.now()

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
        text = text_of([gather(directory, ending(directory))], "html")
        with replacing(directory / FILE_NAME) as file:
            file.write(text.encode(errors="replace"))
        LOG.info("report       %s", directory / FILE_NAME)
    except Exception as error:
        LOG.warning("the report is not written: %s: %s", type(error).__name__, error)
        LOG.info("where the report failed", exc_info=error)


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [Report]
