"""Facts that Slurm tells of a job: the host of rank 0, a name for this start of the step, the end of its time."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from datetime import datetime

_ANSWERING = 10.0
"""Seconds for squeue; a busy controller may take longer, and signals come nevertheless."""


def first_host(nodelist: str) -> str:
    """ "node[03-07,9],other1" -> "node03"; the first task runs there."""
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def step_host(environment: Mapping[str, str] = os.environ) -> str:
    """The host of the step's first task."""
    return first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "localhost")))


def step_token(environment: Mapping[str, str] = os.environ) -> str:
    """A name for this start of the step. A requeued job keeps its number, but remains of its first start must not answer."""
    names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return ".".join(["slurm", *(environment.get(name, "0") for name in names)])


def end_time(environment: Mapping[str, str] = os.environ) -> float | None:
    """The time at which Slurm ends this job, in seconds since 1970; None outside of Slurm, without a limit, or if Slurm does
    not answer."""
    known, job = environment.get("SLURM_JOB_END_TIME", ""), environment.get("SLURM_JOB_ID")
    if known.isdigit():  # since Slurm 22.05 in batch scripts and steps, if the site's is that new
        return float(known)
    if job is None:
        return None
    try:
        words = ["squeue", "--noheader", "--jobs", job, "--format", "%e"]
        answer = subprocess.run(words, capture_output=True, text=True, timeout=_ANSWERING, stdin=subprocess.DEVNULL)
        return datetime.fromisoformat(answer.stdout.strip()).timestamp()
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
