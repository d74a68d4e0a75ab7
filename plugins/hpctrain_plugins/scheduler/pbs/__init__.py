"""PBS Professional and OpenPBS: a batch script for qsub, whose mpiexec (PALS or the MPI's own) starts the ranks."""

from __future__ import annotations

import json
from pathlib import Path

from hpctrain.api import Field, JobState, Launch, Scheduler, hookimpl
from hpctrain.toolkit.scripts import Line, asked, clock, filled, told_by
from hpctrain_plugins.scheduler.shell import ShellOptions, program

# characters of a job's name, where PBS is old
_LONGEST_NAME = 15
# the script's exit code after a SIGTERM
_TOLD = 143
# PBS adds the signal to this for an exit status
_KILLED = 256


class PBSOptions(ShellOptions):
    queue: Line | None = Field(default=None, description="queue")
    account: Line | None = Field(default=None, description="account or project to charge")
    gpus_per_rank: int = Field(default=0, ge=0, description="GPUs of each rank (ngpus)")
    select: Line | None = Field(
        default=None, description='more resources of each node, such as "mem=500gb:system=polaris"'
    )
    mpiexec: list[Line] = Field(
        default=[], description="the words that start the ranks (default: mpiexec with -n and --ppn, as PALS and MPICH take it, "
        "or with --map-by for Open MPI)",
    )  # fmt: skip
    extra: list[Line] = Field(default=[], description='more options of qsub, such as "-l filesystems=home:eagle"')


class PBS(Scheduler):
    """qsub with mpiexec; the job submits itself again until it is done."""

    name = "pbs"
    Options = PBSOptions
    options: PBSOptions
    script_name = "submit.pbs"

    def render(self, launch: Launch) -> str:
        return filled(
            Path(__file__).with_name("script.sh.j2"),
            launch=launch,
            options=self.options,
            name=launch.name[:_LONGEST_NAME],
            select=self._select(launch),
            time=clock(launch.seconds or 0),
            mpiexec=self._mpiexec(launch),
            program=program(self.options, launch, self.options.gpus_per_rank > 0),
            script=launch.directory / self.script_name,
            record=launch.runs[0].record,
        )

    def submit(self, script: Path, launch: Launch) -> list[str]:
        # not in the script: when it submits itself again, these jobs may be forgotten
        after = ["-W", f"depend=afterok:{':'.join(launch.after)}"] if launch.after else []
        return [told_by(["qsub", *after, str(script)], "qsub refused the job").splitlines()[-1]]

    def state(self, id: str) -> JobState:
        shown = asked(["qstat", "-x", "-f", "-F", "json", id])
        jobs = json.loads(shown).get("Jobs", {}) if shown else {}
        if not jobs:
            return JobState("unknown", "PBS has forgotten the job")
        job = next(iter(jobs.values()))
        letter = job.get("job_state", "")
        if letter in ("R", "E", "B"):
            return JobState("running", f"on {job.get('exec_host', 'its nodes')}")
        if letter != "F":
            return JobState("pending", f"({job.get('comment', letter)})")
        if "Exit_status" not in job:
            return JobState("cancelled", "before it began")
        code = int(job["Exit_status"])
        if code == 0:
            return JobState("done")
        return JobState("cancelled" if code == _TOLD or code >= _KILLED else "failed", f"(exit status {code})")

    def cancel(self, id: str, directory: Path) -> None:
        told_by(["qdel", id], f"qdel refused to end job {id}")

    def _select(self, launch: Launch) -> str:
        ranks, gpus = launch.ranks_per_node, self.options.gpus_per_rank
        parts = [str(launch.nodes), f"ncpus={ranks * (launch.cpus_per_rank or 1)}", f"mpiprocs={ranks}"]
        parts += [f"ngpus={gpus * ranks}"] if gpus else []
        return ":".join([*parts, *([self.options.select] if self.options.select else [])])

    def _mpiexec(self, launch: Launch) -> list[str]:
        per_node = launch.ranks_per_node
        own = f"--map-by ppr:{per_node}:node" if launch.mpi == "Open MPI" else f"--ppn {per_node}"
        return self.options.mpiexec or ["mpiexec", "-n", str(launch.nodes * per_node), *own.split()]


@hookimpl
def hpctrain_scheduler() -> list[type[Scheduler]]:
    return [PBS]
