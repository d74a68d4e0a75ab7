"""The live view of runs: looks, draws, waits for a key."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from hpctrain.base.errors import UsageError, reason
from hpctrain.job.output_lock import FILE_NAME as LOCK
from hpctrain_tools.runs.frame import frame
from hpctrain_tools.runs.room import Room
from hpctrain_tools.runs.run_directory import RunDirectory
from hpctrain_tools.runs.screen import Screen
from hpctrain_tools.runs.watcher import Watcher
from hpctrain_tools.submit.record import newest

# seconds between two looks. No file system tells of what other nodes write, so the view asks.
_BETWEEN = 1.0
# seconds given to the rows for a single frame
_READING_ONCE = 5.0
# columns where the output is no terminal
_UNLIMITED = 10_000


def watched(directories: Sequence[Path]) -> list[Watcher]:
    """The runs of the directories; of an array's, all of its runs. A directory may come later. Raises UsageError for another."""
    found: list[Path] = []
    for directory in directories:
        run = RunDirectory(directory)
        submission = None if run.is_run() else newest(directory)
        if submission is not None:
            found += [directory / name for name in submission.runs]
        elif run.is_run() or not directory.exists() or (directory / LOCK).exists():
            found.append(directory)
        else:
            what = "no run in it" if directory.is_dir() else "no directory"
            raise UsageError(
                f"{directory}: found {what}, expected the directory of a run, such as runs/NAME; hpctrain runs lists them"
            )
    return [Watcher(one) for one in dict.fromkeys(found)]


def show_once(runs: Sequence[Watcher]) -> None:
    """Print a frame: as wide as the terminal, or whole where there is none."""
    console = Console(highlight=False)
    is_terminal = sys.stdout.isatty()
    room = Room(console.width if is_terminal else _UNLIMITED, console.options.ascii_only)
    for line in frame([one.look(_READING_ONCE) for one in runs], room, None):
        if is_terminal:
            console.print(line, soft_wrap=True)
        else:
            print(line.plain)


def show(runs: Sequence[Watcher]) -> None:
    """Draw frames until somebody types q or Ctrl-C."""
    try:
        with Screen() as screen:
            keys = ""
            while "q" not in keys.lower():
                seen = [one.look() for one in runs]
                columns, height = screen.size
                over = all(one.standing.is_over for one in seen)
                hint = f"{'ended' if over else 'live'}; q ends the view{', not the run' * (not over)}"
                screen.draw(frame(seen, Room(columns, screen.ascii_only), height, hint))
                keys = screen.wait(0.0 if any(one.history.unread for one in seen) else _BETWEEN)
    except KeyboardInterrupt:
        return
    except OSError as error:
        if error.filename is not None:
            raise
        raise UsageError(f"the terminal is gone: {reason(error)}") from None
