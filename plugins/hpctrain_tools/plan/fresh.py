"""Plans the ranks of a job in a new process of Python: torch learns of another device only before it differentiates first."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from pydantic import TypeAdapter

from hpctrain.base.child_python import python_module
from hpctrain.base.errors import EXIT_ENVIRONMENT, EXIT_USAGE, EnvironmentUnfitError, HpctrainError, UsageError
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob
from hpctrain_tools.plan.processes import plan_ranks
from hpctrain_tools.plan.rank_plan import RankPlan

_PLANS = TypeAdapter(list[RankPlan])
# seconds
_LONGEST = 3600.0


def plan_ranks_apart(raw: RawJob, size: int, per_node: int) -> list[RankPlan]:
    """The result and the errors of plan_ranks."""
    asked = json.dumps({"tables": raw.tables, "size": size, "per_node": per_node})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = python_module("hpctrain_tools.plan.fresh")
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=_LONGEST, check=False, env=environment
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentUnfitError(f"the plan was not ready within {_LONGEST:g} s") from None
    if done.returncode:
        kind = UsageError if done.returncode == EXIT_USAGE else EnvironmentUnfitError
        raise kind(done.stderr.strip() or f"the process that planned has ended with {done.returncode}")
    return _PLANS.validate_json(done.stdout)


def main() -> int:
    """Plan what standard input asks for, and write the plans to standard output."""
    out = os.dup(1)
    os.dup2(2, 1)  # plugins may print
    asked = json.load(sys.stdin)
    try:
        checked = check(RawJob(asked["tables"], {}, "job"), asked["size"])
        found = plan_ranks(checked, asked["size"], asked["per_node"])
    except HpctrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code if error.exit_code == EXIT_USAGE else EXIT_ENVIRONMENT
    with os.fdopen(out, "wb") as file:
        file.write(_PLANS.dump_json(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
