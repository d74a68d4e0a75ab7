"""Flux: a batch script for `flux batch`, in which `flux submit` starts the ranks."""

from __future__ import annotations

from pathlib import Path

from hpctrain.api import Field, JobState, Launch, Scheduler, hookimpl
from hpctrain.toolkit.scripts import Line, asked, filled, told_by
from hpctrain_plugins.scheduler.shell import ShellOptions, program

_WAITS = ("DEPEND", "PRIORITY", "SCHED")
_RUNS = ("RUN", "CLEANUP")


class FluxOptions(ShellOptions):
    queue: Line | None = Field(default=None, description="queue")
    bank: Line | None = Field(default=None, description="bank to charge")
    gpus_per_rank: int = Field(default=0, ge=0, description="GPUs of each rank")
    extra: list[Line] = Field(default=[], description='more options of flux batch, such as "--requires=rack1"')


class Flux(Scheduler):
    """flux batch; the job submits itself again until it is done."""

    name = "flux"
    Options = FluxOptions
    options: FluxOptions
    script_name = "submit.flux"

    def render(self, launch: Launch) -> str:
        return filled(
            Path(__file__).with_name("script.sh.j2"),
            launch=launch,
            options=self.options,
            output=f"{launch.directory}/flux-{{{{id}}}}.out",  # Flux fills in the id
            resources=self._resources(launch),
            program=program(self.options, launch, self.options.gpus_per_rank > 0),
            script=launch.directory / self.script_name,
            record=launch.runs[0].record,
        )

    def submit(self, script: Path, launch: Launch) -> list[str]:
        # not in the script: when it submits itself again, these jobs may be forgotten
        after = [f"--dependency=afterok:{id}" for id in launch.after]
        return [told_by(["flux", "batch", *after, str(script)], "flux refused the job").splitlines()[-1]]

    def state(self, id: str) -> JobState:
        shown = asked(["flux", "jobs", "--no-header", "--format={status}|{returncode}|{nodelist}", id])
        word, code, nodes = (shown or "||").split("|")
        if not word:
            return JobState("unknown", "Flux has forgotten the job")
        if word in _WAITS:
            return JobState("pending", f"({word})")
        if word in _RUNS:
            return JobState("running", f"on {nodes}")
        if word == "COMPLETED":
            return JobState("done")
        return JobState("cancelled") if word == "CANCELED" else JobState("failed", f"({word}, exit code {code})")

    def cancel(self, id: str, directory: Path) -> None:
        told_by(["flux", "cancel", id], f"flux refused to end job {id}")

    def _resources(self, launch: Launch) -> list[str]:
        options = [f"--nodes={launch.nodes}", f"--ntasks={launch.nodes * launch.ranks_per_node}"]
        options += [f"--cores-per-task={launch.cpus_per_rank}"] if launch.cpus_per_rank else []
        return options + ([f"--gpus-per-task={self.options.gpus_per_rank}"] if self.options.gpus_per_rank else [])


@hookimpl
def hpctrain_scheduler() -> list[type[Scheduler]]:
    return [Flux]
