"""Processes that load samples: the lines at which they stand, for a rank that waits for them, and their end with the rank."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from hpctrain.ranks.watchdog.stacks import loading_line

_LOOK = 1.0  # seconds between two looks of a worker, at its own line and at its rank
_LONGEST = 512  # bytes of a line

_shared: list[Sequence[Any]] = []  # for each pool of this process the memory in which its workers write


def share_lines(context: Any, workers: int) -> Sequence[Any]:
    """Memory for the line of each worker of a pool. context: of multiprocessing, which starts the workers."""
    lines = [context.RawArray("c", _LONGEST) for _ in range(workers)]
    _shared.append(lines)
    return lines


def forget_lines(lines: Sequence[Any]) -> None:
    """The workers have ended."""
    _shared.remove(lines)


def be_watched(line: Any) -> None:
    """Let this worker write down its line now and then, and end when its rank has ended in any way."""
    main = threading.main_thread().ident
    threading.Thread(target=_watch, args=(line, main, os.getppid()), name="end with the rank", daemon=True).start()


def worker_lines() -> list[str]:
    """The lines at which workers of this process run code of the user's, each once."""
    return list(dict.fromkeys(line.value.decode(errors="replace") for lines in _shared for line in lines if line.value))


def _watch(line: Any, main: int | None, parent: int) -> None:
    """parent: of this process. It is the rank, or a server that lives as long as a worker does: then the rank counts."""
    rank = multiprocessing.parent_process()
    while os.getppid() == parent and (rank is None or rank.is_alive()):
        line.value = (loading_line(main) or "").encode()[: _LONGEST - 1]
        time.sleep(_LOOK)
    os._exit(1)
