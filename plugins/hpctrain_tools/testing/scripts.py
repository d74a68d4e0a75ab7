"""Promises of a scheduler: its scripts start the run's job and end with the ranks' exit code, and its states are known ones."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hpctrain.api import EnvironmentUnfitError, JobState, Launch, Scheduler, SubmittedRun, UsageError
from hpctrain_tools.testing.kit import Kit

_WORDS = get_args(get_type_hints(JobState)["word"])
# what a script may start ranks with, and what it may tell its scheduler
_STARTERS = ("hpctrain", "mpiexec", "mpirun", "srun", "flux", "jsrun", "aprun", "prun")
_ORDERS = ("sbatch", "scontrol", "qsub", "bsub", "tsp", "sleep")


def examine_scripts(kit: Kit) -> None:
    """Render scripts for directories with plain and odd names, run them with stand-ins for what starts ranks, ask for a state."""
    plugin, starts = kit.made(), False
    assert isinstance(plugin, Scheduler)
    for name in ("kit", "an odd $name's 'place'", "a place"):
        directory = kit.directory / name
        directory.mkdir()
        run = SubmittedRun(directory, directory / "job.submitted.toml", "")
        run.job.touch()
        launch = Launch("kit", directory, (run,), directory, 1, 2, 1, 60, 30, ("hpctrain",))
        with suppress(UsageError, EnvironmentUnfitError):  # it may refuse such names, in a sentence
            script = plugin.render(launch)
            starts = _look_at(kit, script, launch, starts)
            with _marked_path():
                if plugin.render(launch) != script:
                    kit.breaks("renders what the launch says", "the script depends on this shell's PATH")
    with suppress(UsageError, EnvironmentUnfitError, OSError):
        state: Any = plugin.state("1")
        if not isinstance(state, JobState) or state.word not in _WORDS:
            kit.breaks("gives a state that hpctrain knows", f"gave {state}, expected one of {', '.join(_WORDS)}")


@contextmanager
def _marked_path() -> Iterator[None]:
    before = os.environ["PATH"]
    os.environ["PATH"] = f"{before}:/kit"
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _look_at(kit: Kit, script: object, launch: Launch, starts: bool) -> bool:
    """Whether a script starts ranks, as far as the kit knows the commands for that. starts: whether it must."""
    if not isinstance(script, str):
        kit.breaks("renders the text of a script", f"rendered {type(script).__name__}")
        return False
    if not script.startswith("#!") or "sh" not in script.splitlines()[0]:
        return False
    where = f"in the directory {launch.directory.name!r}"
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, timeout=30)
    started, code = _run_with_stand_ins(script, launch.directory)
    if done.returncode:
        kit.breaks("renders a script that the shell reads", f"{where}: {done.stderr.strip()}")
    elif (started or starts) and str(launch.runs[0].job) not in started:
        kit.breaks(
            "starts the ranks with the run's job", f"{where} they get {' '.join(started) or 'nothing'}; quote paths"
        )
    elif started and code != 75:
        kit.breaks(
            "its script ends with the exit code of the ranks",
            f"it ended with {code} where they had saved and ended with 75",
        )
    return bool(started)


def _run_with_stand_ins(script: str, directory: Path) -> tuple[list[str], int]:
    """The words that a script has started ranks with, and its exit code. What it starts them with ends with 75 at once."""
    commands, words = directory / "stand-ins", directory / "words"
    commands.mkdir()
    for name in (*_STARTERS, *_ORDERS):
        stand_in = commands / name
        ending = """printf '%s\\n' "$@" >>"$KIT_WORDS"; exit 75""" if name in _STARTERS else "exit 0"
        stand_in.write_text(f"#!/bin/sh\n{ending}\n")
        stand_in.chmod(0o700)
    variables = {**os.environ, "PATH": f"{commands}:/usr/bin:/bin", "KIT_WORDS": str(words)}
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=directory,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=30,
        )
        return words.read_text().splitlines() if words.exists() else [], done.returncode
    return [], 0
