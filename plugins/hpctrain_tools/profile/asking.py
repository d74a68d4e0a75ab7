"""Asks a running job for a window of steps, and waits for its traces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.toolkit.commands import EXIT_TRAINING, UsageError, escaped, say
from hpctrain_tools.profile.layout import REQUEST
from hpctrain_tools.runs.asking import Asked, ask, asked, silence

# seconds for a job that may hang to say where its ranks stand
_WHERE = 15.0


def record_now(run: Path, values: Mapping[str, Any], timeout: float, wait: float) -> tuple[str, int]:
    """Have the job in `run` record steps; the window's name, and the exit code: not 0 if a rank's trace is missing.

    timeout: seconds for the job to take the request. wait: for the traces after that. Raises UsageError if there is no window.
    """
    with asked(run, REQUEST, values) as job:
        # a newer answer replaces one that was not read
        taken = _until(job, timeout, ("taken", "gathering", "done", "refused"))
        if taken is None or taken["state"] == "waiting":
            raise _not_taken(run, taken, timeout)
        if taken["state"] == "refused":
            raise UsageError(f"{run}: the job does not record: {taken['why']}")
        ranks = [int(rank) for rank in taken["ranks"]]
        say(f"recording    steps {taken['first']} to {taken['last']} on {_named(ranks)}", err=True)
        done = taken if taken["state"] == "done" else _until(job, wait, ("done", "refused")) or taken
        if done["state"] != "done":
            raise _not_done(run, done, ranks, wait)
    missing = {int(rank): str(why) for rank, why in done["missing"].items()}
    for rank, why in missing.items():
        say(f"missing      rank {rank}: {why}", err=True)
    return str(done["window"]), EXIT_TRAINING if missing else 0


def _until(job: Asked, seconds: float, states: tuple[str, ...]) -> dict[str, Any] | None:
    """The first answer of one of these states, or the newest one after so many seconds."""
    newest = None
    for found in job.answers(seconds):
        newest = {key: escaped(value) if isinstance(value, str) else value for key, value in found.items()}
        if newest.get("state") in states:
            break
    return newest


def _not_taken(run: Path, waiting: Mapping[str, Any] | None, timeout: float) -> UsageError:
    if waiting is None:
        return silence(run, timeout)
    return UsageError(
        f"{run}: the job runs, but ended no step within {timeout:g} s: rank 0 is in {waiting['where']}. The request is withdrawn; "
        f"give a longer --timeout if steps take that long{_positions(run)}"
    )


def _not_done(run: Path, newest: Mapping[str, Any], ranks: list[int], wait: float) -> UsageError:
    if newest["state"] == "refused":
        return UsageError(f"{run}: there are no traces: {newest['why']}")
    come = newest["come"] if newest["state"] == "gathering" else []
    missing = [rank for rank in ranks if rank not in come]
    return UsageError(
        f"{run}: the traces of {_named(missing)} have not come within {wait:g} s; if the job goes on, they will be in {run}/profile"
        f"{_positions(run)}"
    )


def _positions(run: Path) -> str:
    """The positions of the ranks, in lines of their own."""
    try:
        return "".join(f"\n  {line}" for line in ask(run, _WHERE))
    except UsageError:
        return f"\n  `hpctrain where {run}` had no answer: the job may have ended"


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:20]))}{' ...' if len(ranks) > 20 else ''}"
