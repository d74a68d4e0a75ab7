"""The numbers of ranks that fit a job: on which an elastic job can go on."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from hpctrain.base.errors import HpctrainError, UsageError
from hpctrain.checking.check import CheckedJob, check
from hpctrain.checking.choices import plugin_problems
from hpctrain.checking.combinations import combination_problems
from hpctrain.job.problems import JobError, PlacedProblem, sentence
from hpctrain.job.reading import read_job
from hpctrain.model.mesh import layout_of, plan_of

_SHOWN = 8
"""Numbers that a note lists."""


def why_not(checked: CheckedJob, ranks: int) -> str | None:
    """Why the job's layout and global batch don't fit so many ranks; None if they do. [parallelism] keeps its sizes."""
    job, parts = checked.job, checked.parts
    try:
        layout = layout_of(job, parts, ranks)
    except UsageError as error:
        return str(error)
    plan = plan_of(job, parts, checked.plan.outline, layout)
    problems = [*combination_problems(job, parts, plan), *plugin_problems(job, parts, plan, checked.registry)]
    return problems[0].message if problems else None


def elastic_note(checked: CheckedJob, ranks: int | None) -> str | None:
    """The numbers of ranks on which the job can go on when some of `ranks` are missing, as a sentence. Raises JobError for none."""
    table = checked.job.elastic
    if table is None or ranks is None or table.min_ranks >= ranks:
        return None
    fewer = range(ranks - 1, table.min_ranks - 1, -1)
    fits = [number for number in fewer if why_not(checked, number) is None]
    if not fits:
        why = (
            f"[elastic] min_ranks: found {table.min_ranks}, but the job fits no number of ranks from there to {ranks - 1}: on "
            f"{fewer[0]}, {why_not(checked, fewer[0])}; expected a lower number, or leave [elastic] out"
        )
        raise JobError(checked.raw, [PlacedProblem(("elastic", "min_ranks"), why)])
    more = f" and {len(fits) - _SHOWN} more" if len(fits) > _SHOWN else ""
    return f"[elastic]: when some of {ranks} ranks are missing, the job goes on with {', '.join(map(str, fits[:_SHOWN]))}{more}"


def main() -> None:
    """A program of its own, for `hpctrain run`, which imports no torch: `JOB LEAST MOST OVERRIDE...`.

    The last line of its output is JSON: the numbers that fit, from MOST down, and why others don't; or an error.
    """
    job, least, most, *overrides = sys.argv[1:]
    try:
        checked = check(read_job(Path(job), overrides), None)
        why = {number: why_not(checked, number) for number in range(int(most), int(least) - 1, -1)}
        answer: dict[str, Any] = {
            "fits": [number for number, reason in why.items() if reason is None],
            "why": {str(number): reason for number, reason in why.items() if reason is not None},
        }
    except HpctrainError as error:
        answer = {"error": sentence(error)}
    print("\n" + json.dumps(answer))
