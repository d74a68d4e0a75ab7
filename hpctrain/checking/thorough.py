"""The whole check of `hpctrain check` and `hpctrain submit`: the job, its data and weights, and its directory."""

from __future__ import annotations

from hpctrain.checking.check import CheckedJob, check
from hpctrain.checking.outside import open_outside
from hpctrain.checking.resolved import FILE_NAME, refuse_other_job, resolved_tables
from hpctrain.data.opening import Data
from hpctrain.job.problems import JobError
from hpctrain.job.reading import RawJob


def check_thoroughly(raw: RawJob, ranks: int | None) -> tuple[CheckedJob, Data]:
    """The job and its data. Raises JobError with every problem, UsageError if the output directory holds another job,
    EnvironmentUnfitError for a plugin that makes something unfit."""
    checked = check(raw, ranks, tries=True)
    checked.registry.refuse_unfit_parts()
    data, problems = open_outside(checked.job, checked.parts)
    if data is None or problems:
        raise JobError(checked.raw, problems)
    refuse_other_job(checked.job.output_dir / FILE_NAME, resolved_tables(checked))
    return checked, data
