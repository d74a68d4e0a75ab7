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
from hpctrain.job.problems import sentence
from hpctrain.job.reading import read_job
from hpctrain.model.mesh import layout_of, plan_of


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
