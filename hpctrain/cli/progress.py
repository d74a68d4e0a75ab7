"""A progress bar that appears after two seconds, on a terminal only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

SECONDS_BEFORE = 2.0


@contextmanager
def bytes_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (bytes done, bytes in total); draws on stderr."""
    console = Console(stderr=True)
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    begin, task = time.monotonic(), bar.add_task(label)

    def advance(done: int, total: int) -> None:
        if console.is_terminal and not bar.live.is_started and time.monotonic() - begin > SECONDS_BEFORE:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
