"""Slurm's variables of a step whose ranks have no MPI: the host of rank 0, and a name for this start of the step."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping


def first_host(nodelist: str) -> str:
    """ "node[03-07,9],other1" -> "node03"; the first task runs there."""
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def step_host(environment: Mapping[str, str] = os.environ) -> str:
    """The host of the step's first task."""
    return first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "localhost")))


def step_token(environment: Mapping[str, str] = os.environ) -> str:
    """A name for this start of the step. A requeued job has the same number, and leftovers of its first try must not answer."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(["slurm", *(environment.get(name, "0") for name in names)])
