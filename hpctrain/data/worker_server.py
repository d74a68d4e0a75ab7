"""The process that a rank's workers are forked from: a fork of the rank from before it has threads or MPI. Linux only.

It is multiprocessing's fork server, which would otherwise begin with imports of its own when the first worker starts.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import forkserver, util
from typing import Any, NoReturn

from hpctrain.ranks import process
from hpctrain.ranks.process import show_command
from hpctrain.ranks.signals import STOPPING, keep_from_children

PRELOADED = "hpctrain.data.pool"
"""Imports torch, and what a worker needs of hpctrain."""


def is_wanted(tables: Mapping[str, Any]) -> bool:
    """Whether a job asks for workers that are forked from a server. Values of wrong types are reported later."""
    table = tables.get("dataset")
    if not isinstance(table, dict) or sys.platform != "linux":
        return False
    workers = table.get("workers")
    return type(workers) is int and workers > 0 and table.get("start_method", "forkserver") == "forkserver"


def begin_early() -> None:
    """Fork the server. Call it before this process has threads or MPI; where it has threads, the first worker starts a server."""
    importlib.import_module(PRELOADED)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    keep_from_children()
    start = util.spawnv_passfds
    forkserver.set_forkserver_preload([PRELOADED])
    util.spawnv_passfds = partial(_fork, start)
    try:
        forkserver.ensure_running()
    finally:
        util.spawnv_passfds = start
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _fork(start: Any, path: Any, words: Sequence[Any], descriptors: Sequence[int]) -> int:
    """Fork the server, in place of multiprocessing's function that starts its command."""
    pid = os.fork()
    if pid == 0:
        try:
            _serve([os.fsdecode(word) for word in words], descriptors)
        finally:
            os._exit(1)
    if process.other_threads() == 0:  # those that OpenBLAS had have ended before the fork, as it provides for
        return pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return int(start(path, words, descriptors))


def _serve(words: Sequence[str], descriptors: Sequence[int]) -> NoReturn:
    """Become the server, whose program is the last word."""
    _close_connections(descriptors)
    signal.pthread_sigmask(signal.SIG_SETMASK, STOPPING)  # as keep_from_children
    show_command(words)
    gc.collect()
    gc.freeze()  # else a collection would copy the pages that workers share
    with suppress(SystemExit):
        exec(words[-1], {})  # it returns when the rank and its workers have ended
    shutil.rmtree(util.get_temp_dir(), ignore_errors=True)  # a rank that was killed could not
    os._exit(0)


def _close_connections(kept: Sequence[int]) -> None:
    """Close sockets and pipes: a launcher notices by its own that a rank has ended."""
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        with suppress(OSError):  # the one of this listing
            kind = os.fstat(descriptor).st_mode
            if descriptor > 2 and descriptor not in kept and (stat.S_ISSOCK(kind) or stat.S_ISFIFO(kind)):
                os.close(descriptor)


class Surroundings:
    """The surroundings that a worker would have inherited from the rank, had it been started by it: set where this object is
    unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _surround, (dict(os.environ), os.sched_getaffinity(0))


def _surround(environment: dict[str, str], cores: set[int]) -> None:
    # the server may be one that other code of the program has started
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    with suppress(OSError):  # they have been taken from the job
        os.sched_setaffinity(0, cores)
