"""The scheduler `ray`: `hpctrain submit --to ray` leaves a supervisor on the cluster, which places and watches the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpctrain.api import JobState, Launch, Plan, Problem, Scheduler, UsageError, hookimpl
from hpctrain.toolkit.commands import EXIT_CANCELLED, EXIT_DONE, python_module
from hpctrain.toolkit.scripts import quoted
from hpctrain_ray.ids import JobId, read_end
from hpctrain_ray.options import RayOptions
from hpctrain_ray.order import Order

_WORDS = {EXIT_DONE: "done", EXIT_CANCELLED: "cancelled"}


class Ray(Scheduler):
    """A Ray cluster: a placement group with a bundle for each rank; lost ranks and nodes are replaced."""

    name = "ray"
    Options = RayOptions
    options: RayOptions

    def problems(self, plan: Plan) -> list[Problem]:
        """Problems of the number of `workers`."""
        table = plan.tables["scheduler"]["ray"]
        asked = int(table["nodes"]) * int(table["ranks_per_node"])
        if self.options.count in (None, asked):
            return []
        why = (
            f"found {self.options.count}, expected one for each of nodes x ranks_per_node = {asked} ranks: let nodes and "
            "ranks_per_node say how many there are, and workers what each needs"
        )
        return [Problem(why, "scheduler.ray.workers")]

    def render(self, launch: Launch) -> str:
        if launch.after:
            raise UsageError("--after: Ray starts a job as soon as there is room, and knows no order; leave it out")
        count = launch.nodes * launch.ranks_per_node
        program = python_module("hpctrain_ray", str(launch.runs[0].job), "-n", str(count))
        return (
            "#!/bin/sh\n"
            "# Written by `hpctrain submit`, which leaves the same on the cluster: a supervisor of these ranks.\n"
            f"cd {quoted(launch.working_directory)} || exit\n"
            f"while {quoted(*program)}; code=$?; [ $code -eq 75 ]; do :; done\n"
            "exit $code\n"
        )

    def submit(self, script: Path, launch: Launch) -> list[str]:
        from hpctrain_ray.connection import connected
        from hpctrain_ray.detached import start_detached

        run = launch.runs[0]
        id = JobId.new(run.directory)
        with connected(self.options.address):
            start_detached(self._order(launch), id)
        return [str(id)]

    def _order(self, launch: Launch) -> Order:
        """The order of `launch`."""
        import tomli

        from hpctrain_ray.running import order_of

        run = launch.runs[0]
        ranks = launch.nodes * launch.ranks_per_node
        order = order_of(tomli.loads(run.text), self.options, ranks, run.job)
        order = replace(order, directory=launch.working_directory, output=run.directory)
        return replace(order, seconds=launch.seconds, save_seconds=launch.save_seconds)

    def state(self, id: str) -> JobState:
        return self.states([id])[id]

    def states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        from hpctrain_ray.connection import connected
        from hpctrain_ray.detached import ask_detached, find_detached

        found = {id: state for id in ids if (state := self._ended(JobId.of(id))) is not None}
        live = [id for id in ids if id not in found]
        if not live:
            return found
        with connected(self.options.address):
            for id in live:
                actor = find_detached(JobId.of(id))
                told = None if actor is None else ask_detached(actor, "look")
                gone = JobState("unknown", "the Ray cluster has no such job any more")
                found[id] = JobState(*told) if told else self._ended(JobId.of(id)) or gone
        return found

    def _ended(self, job: JobId) -> JobState | None:
        end = read_end(job)
        if end is None:
            return None
        word = _WORDS.get(end.code, "failed")
        why = f": {end.why}" if end.why else ""
        return JobState("done") if word == "done" else JobState(word, f"(exit code {end.code}{why})")  # type: ignore[arg-type]

    def cancel(self, id: str, directory: Path) -> None:
        from hpctrain_ray.connection import connected
        from hpctrain_ray.detached import ask_detached, find_detached

        with connected(self.options.address):
            actor = find_detached(JobId.of(id))
            if actor is None:
                raise UsageError(f"the Ray cluster has no job {id} any more; `hpctrain status` tells how it has ended")
            ask_detached(actor, "stop")


@hookimpl
def hpctrain_scheduler() -> list[type[Scheduler]]:
    return [Ray]
