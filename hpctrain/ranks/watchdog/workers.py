"""Worker processes that load samples: their Python stacks for a rank that waits for them, and their end with the rank.

A worker dumps its stack into a file of its own when it gets a signal: faulthandler does so even if the worker is in a call
that never returns.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from hpctrain.base.safe_files import closed_directory
from hpctrain.ranks.starter_directory import PIPE, sweep

_SIGNAL = signal.SIGUSR2
_DUMPING = 0.5
"""Seconds for the workers to write."""
_LOOK = 1.0
"""Seconds between two looks at the rank."""

_directories: dict[Path, int] = {}
"""The directories of this process's pools, and the descriptor that marks each as somebody's."""


def new_directory() -> Path:
    """A directory for the files of one pool's workers."""
    sweep("hpctrain-workers-*")
    directory = closed_directory("workers-")
    os.mkfifo(directory / PIPE)
    _directories[directory] = os.open(directory / PIPE, os.O_RDWR)
    return directory


def remove_directory(directory: Path) -> None:
    """The workers have ended."""
    if directory in _directories:
        os.close(_directories.pop(directory))
    shutil.rmtree(directory, ignore_errors=True)


def be_watched(directory: Path) -> None:
    """Let this worker answer the signal, and end when its rank has ended in any way."""
    threading.Thread(target=_end_with, args=(os.getppid(),), name="end with the rank", daemon=True).start()
    path = directory / f"{os.getpid()}.begun"
    file = open(path, "a")  # noqa: SIM115 - open while the process lives
    faulthandler.register(_SIGNAL, file=file, all_threads=False)
    path.rename(path.with_suffix(""))  # not before: without a handler, the signal ends a process


def _end_with(parent: int) -> None:
    """parent: of this process. It is the rank, or a server that lives as long as a worker does: then the rank counts."""
    rank = multiprocessing.parent_process()
    while os.getppid() == parent and (rank is None or rank.is_alive()):
        time.sleep(_LOOK)
    os._exit(1)


def worker_stacks() -> dict[int, str]:
    """The stack of each worker of this process, by process; innermost line first."""
    children = {str(process.pid) for process in multiprocessing.active_children()}
    files = [file for directory in list(_directories) for file in directory.glob("*") if file.name in children]
    for file in files:
        with suppress(OSError):
            os.truncate(file, 0)
            os.kill(int(file.name), _SIGNAL)
    if files:
        time.sleep(_DUMPING)
    found = {}
    for file in files:
        with suppress(OSError):
            found[int(file.name)] = file.read_text(errors="replace")
    return found
