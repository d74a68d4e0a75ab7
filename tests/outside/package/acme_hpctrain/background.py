"""A scheduler that is none: the script runs in the background of this machine."""

from __future__ import annotations

import shlex
import signal
import subprocess
from os import kill
from pathlib import Path

from hpctrain.api import Field, JobState, Launch, Options, Scheduler, UsageError, hookimpl
from hpctrain.toolkit.scripts import clock


class BackgroundOptions(Options):
    niceness: int = Field(default=0, ge=0, le=19, description="how far other programs come first")


class Background(Scheduler):
    """Runs the job in the background of this machine."""

    name = "background"
    Options = BackgroundOptions
    options: BackgroundOptions
    script_name = "background.sh"

    def render(self, launch: Launch) -> str:
        if launch.nodes > 1 or launch.after:
            raise UsageError("[scheduler.background]: found several nodes or --after, expected one job on this machine")
        run = launch.runs[0]
        words = ["nice", "-n", self.options.niceness, *launch.program, "run", run.job, "-n", launch.ranks_per_node]
        head = f"# limit {clock(launch.seconds)}\n" if launch.seconds else ""
        again = f"{shlex.join(map(str, words))}; code=$?; [ $code -eq 75 ]"
        ended = shlex.quote(str(run.directory / "ended"))
        return f"#!/bin/sh\n{head}exec >{ended}.out 2>&1\nwhile {again}; do echo again; done\necho $code >{ended}\n"

    def submit(self, script: Path, launch: Launch) -> list[str]:
        running = subprocess.Popen(["sh", script], cwd=launch.working_directory, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        return [f"{running.pid}@{launch.runs[0].directory}"]

    def state(self, id: str) -> JobState:
        number, _, directory = id.partition("@")
        ended = Path(directory, "ended")
        if ended.exists():
            code = ended.read_text().strip()
            word = {"0": "done", "143": "cancelled"}.get(code, "failed")
            return JobState(word, "" if word == "done" else f"(exit code {code})")
        return JobState("running", f"as process {number}") if Path("/proc", number).exists() else JobState("cancelled")

    def cancel(self, id: str, directory: Path) -> None:
        number = id.partition("@")[0]
        for child in Path("/proc", number, "task", number, "children").read_text().split():
            kill(int(child), signal.SIGTERM)


@hookimpl
def hpctrain_scheduler():
    return [Background]
