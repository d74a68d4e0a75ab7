"""Runs a job behind another one in a process of its own: what the first has left there may not change the second.

Run as a module, this file is that process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from hpctrain.base.child_python import python_module
from hpctrain_tools.testing.ranks import LATE


def run_behind_another(directory: Path, seconds: float) -> tuple[int, str]:
    """The exit code and the screen of the job.toml in `directory`, in a process that runs before.toml first, on one rank. There,
    texts have other hashes, which each start of Python draws anew."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            python_module("hpctrain_tools.testing.twice"), cwd=directory, env={**os.environ, **variables},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        return LATE, str(error)
    return done.returncode, done.stdout


def main() -> None:
    """Run both jobs."""
    import hpctrain
    from hpctrain.api import HpctrainError

    with suppress(HpctrainError):  # the other job's options may not go together
        hpctrain.run(hpctrain.load_job("before.toml"))
    try:
        hpctrain.run(hpctrain.load_job("job.toml"))
    except HpctrainError as error:
        print(f"hpctrain: {error}")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
