"""Slurm: a batch script for sbatch, whose srun starts the ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.api import Field, JobState, Launch, Scheduler, hookimpl
from hpctrain.toolkit.scripts import Line, asked, clock, filled, told_by
from hpctrain_plugins.scheduler.shell import ShellOptions, program

_MPI = {"MPICH": "pmi2", "Open MPI": "pmix", None: "none"}
_REQUESTS = ("partition", "account", "qos", "gres", "constraint", "reservation")
_WAITS = (
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "RESV_DEL_HOLD",
    "SPECIAL_EXIT",
    "SUSPENDED",
)
# jobs that one squeue is asked about: a command line has limits
_AT_ONCE = 1000
_RUNS = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING")


class SlurmOptions(ShellOptions):
    partition: Line | None = Field(default=None, description="partition (queue)")
    account: Line | None = Field(default=None, description="account to charge")
    qos: Line | None = Field(default=None, description="quality of service")
    gres: Line | None = Field(default=None, description='generic resources of each node, such as "gpu:4"')
    constraint: Line | None = Field(default=None, description='features that the nodes must have, such as "a100"')
    reservation: Line | None = Field(default=None, description="reservation to run in")
    mpi: Line = Field(
        default="auto", description="srun's --mpi; auto: pmi2 for MPICH and its relatives, pmix for Open MPI"
    )
    extra: list[Line] = Field(default=[], description='more options of sbatch, such as "--exclusive"')


class Slurm(Scheduler):
    """sbatch with srun; the job requeues itself until it is done. Several runs are one job array."""

    name = "slurm"
    Options = SlurmOptions
    options: SlurmOptions
    script_name = "submit.sbatch"
    takes_arrays = True

    def render(self, launch: Launch) -> str:
        options, arrays = self.options, len(launch.runs) > 1
        output = str(launch.directory).replace("%", "%%")  # sbatch replaces %j and the like
        return filled(
            Path(__file__).with_name("script.sh.j2"),
            launch=launch,
            options=options,
            arrays=arrays,
            requests=[(name, value) for name in _REQUESTS if (value := getattr(options, name)) is not None],
            time=None if launch.seconds is None else clock(launch.seconds),
            output=f"{output}/slurm-{'%A_%a' if arrays else '%j'}.out",
            cpus=' --cpus-per-task="$SLURM_CPUS_PER_TASK"' if launch.cpus_per_rank else "",
            mpi=_MPI[launch.mpi] if options.mpi == "auto" else options.mpi,
            program=program(options, launch, "gpu" in (options.gres or "")),
        )

    def submit(self, script: Path, launch: Launch) -> list[str]:
        said = told_by(["sbatch", "--parsable", str(script)], "sbatch refused the job")
        number = said.splitlines()[-1].partition(";")[0]  # NUMBER, or NUMBER;CLUSTER
        return [f"{number}_{task}" for task in range(len(launch.runs))] if len(launch.runs) > 1 else [number]

    def state(self, id: str) -> JobState:
        shown = asked(["scontrol", "show", "job", "--oneliner", id])
        if shown is None:
            return _in_accounting([id]).get(id) or JobState("unknown", "Slurm has forgotten the job")
        fields = dict(re.findall(r"\b(JobState|Reason|NodeList|RunTime|ExitCode|Restarts)=(\S*)", shown))
        restarts = fields.get("Restarts", "0")
        again = f", {restarts} restart{'s' * (restarts != '1')}" if restarts != "0" else ""
        return _state(fields["JobState"], fields, again)

    def states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        found: dict[str, JobState] = {}
        for first in range(0, len(ids), _AT_ONCE):
            some = ids[first : first + _AT_ONCE]
            found |= _in_queue(some)
            found |= _in_accounting([id for id in some if id not in found])
        return found

    def cancel(self, id: str, directory: Path) -> None:
        told_by(["scancel", id], f"scancel refused to end job {id}")


def _in_queue(ids: Sequence[str]) -> dict[str, JobState]:
    """The states that squeue tells of those jobs that the controller knows, by id."""
    what = ["--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N|%M"]
    shown = asked(["squeue", *what, f"--jobs={','.join(ids)}"])  # it fails for a single job that is forgotten
    found = {}
    for line in (shown or "").splitlines():
        id, word, reason, nodes, seconds = [*line.split("|"), "", "", "", ""][:5]
        found[id] = _state(word, {"Reason": reason, "NodeList": nodes, "RunTime": seconds}, "")
    return found


def _in_accounting(ids: Sequence[str]) -> dict[str, JobState]:
    """The states that sacct tells of jobs that the controller has forgotten: by default five minutes after their end."""
    if not ids:
        return {}
    what = ["--allocations", "--noheader", "--parsable2", "--format=JobID,State,ExitCode"]
    shown = asked(["sacct", *what, f"--jobs={','.join(ids)}"])
    found = {}
    for line in (shown or "").splitlines():
        id, state, code = [*line.split("|"), "", ""][:3]
        if state:
            found[id] = _state(state.split()[0], {"ExitCode": code}, "")  # "CANCELLED by 1000"
    return found


def _state(word: str, fields: dict[str, str], again: str) -> JobState:
    if word in _WAITS:
        return JobState("pending", f"({fields.get('Reason', word)}){again}")
    if word in _RUNS:
        return JobState("running", f"on {fields.get('NodeList')} for {fields.get('RunTime')}{again}")
    if word == "COMPLETED":
        return JobState("done", again.removeprefix(", "))
    if word == "CANCELLED":
        return JobState("cancelled")
    code = fields.get("ExitCode", "").partition(":")[0]
    return JobState("failed", f"({word}, exit code {code})" if word == "FAILED" and code else f"({word})")


@hookimpl
def hpctrain_scheduler() -> list[type[Scheduler]]:
    return [Slurm]
