"""Writes a job's script into its directory, submits it, and records it there."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from hpctrain.base.errors import HpctrainError, TrainingError, UsageError, WriteError, reason, shown
from hpctrain.base.safe_files import replacing
from hpctrain.contracts.plugin import broken
from hpctrain.contracts.scheduler import CANCELLED, Launch
from hpctrain_tools.submit.asking import Submitted, blamed, submitted
from hpctrain_tools.submit.prepare import Prepared
from hpctrain_tools.submit.record import ID, Submission, append, newest


def scripts(prepared: Prepared, after: str | None) -> list[str]:
    """The scripts that `submit` would submit."""
    with blamed(prepared.checked[0].registry):
        return _rendered(prepared, prepared.launches(_ids(after, prepared)))


def _rendered(prepared: Prepared, launches: list[Launch]) -> list[str]:
    found = [prepared.scheduler.render(one) for one in launches]
    if not all(isinstance(one, str) for one in found):
        raise broken(prepared.scheduler, f"rendered {shown(found[0])}", "the text of a script")
    return found


def submit(prepared: Prepared, after: str | None) -> list[str]:
    """Submit the job; returns the id of each run's job. after: a run's directory or a job's id, which must end well first.

    Raises UsageError if an earlier submission still runs or the scheduler refuses the job, EnvironmentUnfitError if there is none.
    """
    launches = prepared.launches(_ids(after, prepared))
    runs = [run for one in launches for run in one.runs]
    _refuse_live([prepared.directory, *(run.directory for run in runs)], prepared.load)
    ids: list[str] = []
    with blamed(prepared.checked[0].registry):
        rendered = _rendered(prepared, launches)
        if after is not None and launches[0].after == (after,) and prepared.scheduler.state(after).word == "unknown":
            raise UsageError(
                f"--after {after}: {prepared.target} knows no such job, expected one that waits, runs or is done"
            )
        _write(prepared, launches, rendered)
        try:
            for one in launches:
                found = prepared.scheduler.submit(one.directory / prepared.scheduler.script_name, one)
                _record(prepared.target, one, found)
                ids += found
        finally:  # of an array of several jobs some may have been taken
            if len(runs) > 1 and ids:
                names = tuple(run.directory.name for run in runs[: len(ids)])
                _append(prepared.directory, Submission(target=prepared.target, runs=names), ids)
    return ids


def _ids(after: str | None, prepared: Prepared) -> tuple[str, ...]:
    """The ids of the jobs that must end first. Those that are done already are left out."""
    if after is None:
        return ()
    if os.sep not in after and not Path(after).is_dir():
        if not re.fullmatch(ID, after):
            raise UsageError(f"--after {after!r}: expected a run's directory, or the id of a job")
        return (after,)
    ids = []
    target = prepared.target
    for one in submitted(Path(after), prepared.load):
        if one.submission.target != target:
            raise UsageError(
                f"--after {after}: found {one}, expected one of {target}: a scheduler knows only its own jobs"
            )
        state = one.state()
        if state.word in ("failed", "cancelled"):
            said = f"{state.word} {state.detail}".strip()
            raise UsageError(
                f"--after {after}: found {one} {said}, expected a job that runs or is done: submit it again first"
            )
        if state.word == "unknown":
            raise UsageError(
                f"--after {after}: found {one}, of which the scheduler knows nothing any more; expected a job that runs or is "
                "done: if the run is done, leave --after out, else submit it again first"
            )
        if state.is_live:
            ids.append(one.submission.id)
    return tuple(ids)


def _refuse_live(directories: Iterable[Path], load: tuple[str, ...]) -> None:
    """Raises UsageError if a run of one of the directories waits or runs already."""
    live = [one for directory in dict.fromkeys(directories) for one in _earlier(directory, load) if _is_live(one)]
    if live:
        raise UsageError(
            f"{live[0].directory}: found {live[0]}, which has not ended; expected one job at a time: wait for it, end it with "
            f"`hpctrain cancel {live[0].directory}`, or use another [job] output_dir"
        )


def _earlier(directory: Path, load: tuple[str, ...]) -> list[Submitted]:
    return [] if newest(directory) is None else submitted(directory, load)


def _is_live(one: Submitted) -> bool:
    try:
        return one.state().is_live
    except HpctrainError as error:  # another cluster's: the run may have moved here
        print(f"hpctrain: note: {one}, submitted earlier, cannot be asked about: {error}", file=sys.stderr)
        return False


def _write(prepared: Prepared, launches: list[Launch], rendered: list[str]) -> None:
    """Write each run's job and the scripts. Raises UsageError."""
    mode = prepared.checked[0].job.job.mode
    try:
        for launch, script in zip(launches, rendered, strict=True):
            launch.directory.mkdir(mode, parents=True, exist_ok=True)
            for run in launch.runs:
                run.directory.mkdir(mode, parents=True, exist_ok=True)
                _replace(run.job, run.text)
                (run.directory / CANCELLED).unlink(missing_ok=True)
            _replace(launch.directory / prepared.scheduler.script_name, script)
    except OSError as error:
        raise UsageError(f"[job] output_dir: {prepared.directory} cannot be written to: {reason(error)}") from None


def _replace(path: Path, text: str) -> None:
    with replacing(path) as file:
        file.write(text.encode())


def _record(target: str, launch: Launch, ids: list[str]) -> None:
    if len(ids) != len(launch.runs) or not all(isinstance(id, str) and re.fullmatch(ID, id) for id in ids):
        raise TrainingError(
            f"the scheduler {target} submitted {launch.directory} and returned {shown(ids)}; expected {len(launch.runs)} ids of "
            "letters, digits and any of _.:/@+=[]-; cancel the job with the scheduler's own command and mend the plugin"
        )
    for run, id in zip(launch.runs, ids, strict=True):
        _append(run.directory, Submission(target=target, id=id), ids)


def _append(directory: Path, submission: Submission, ids: list[str]) -> None:
    try:
        append(directory, submission)
    except OSError as error:
        raise WriteError(
            f"{submission.target} took the job as {' '.join(ids)}, but {directory} could not record it ({reason(error)}); "
            "cancel it with the scheduler's own command, make room, and submit again"
        ) from None
