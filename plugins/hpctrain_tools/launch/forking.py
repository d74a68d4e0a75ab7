"""Ranks forked from the starter, which imports torch and hpctrain once for all of them. Linux only.

Modules of the job and of other packages are left to the ranks: what they do at their import, such as a look at RANK, they do in
each of them.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from hpctrain.base.child_python import words_behind
from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.launcher_variables import set_variables
from hpctrain.ranks.signals import ANSWERED
from hpctrain.registry.entry_points import entry_points
from hpctrain_tools.launch.mpi_library import ask_library
from hpctrain_tools.launch.processes import StartRank, spawn

# modules that a rank imports on its way to the first step, besides those that importing `hpctrain.training.rank` imports
_ON_THE_WAY = (
    "hpctrain.ranks.failure", "hpctrain.ranks.restricted_pickle", "hpctrain.ranks.watchdog.monitor",
    "hpctrain.base.store.gloo", "encodings.idna", "encodings.utf_8_sig",
)  # fmt: skip
# seconds after its end in which the system may still list a thread
_ENDING = 0.2


def prepare(command: str, tables: Mapping[str, Any]) -> StartRank:
    """How the ranks of a command start on this machine: forked, once what they need is imported here, or each anew."""
    table = tables.get("job")
    # elsewhere than on Linux, system libraries may not be used after a fork; ranks report a [job] of a wrong type
    if sys.platform != "linux" or (isinstance(table, dict) and table.get("start") == "spawn"):
        return spawn
    asking = threading.Thread(target=ask_library)  # in a process of its own, meanwhile
    asking.start()
    _preload(command, tables)
    asking.join()
    library = ask_library()
    if library is not None and not library.speaks_pmi:
        return spawn  # mpiexec starts the ranks
    why = _unfit()
    if why is None:
        gc.collect()
        gc.freeze()  # else a collection would copy the pages that ranks share
        return fork
    print(f"hpctrain: the import of torch and hpctrain {why}, so each rank starts anew", file=sys.stderr, flush=True)
    return spawn


def _preload(command: str, tables: Mapping[str, Any]) -> None:
    from hpctrain.base.torch_private import delay_compiler
    from hpctrain.registry.registry import OWN
    from hpctrain.registry.slots import TABLES, choice_of

    ours = [source for source in entry_points() if source.distribution == OWN]
    tool = next((source.module for source in ours if source.command == command), f"hpctrain.cli.{command}")
    for name in (tool, "hpctrain.training.rank", *_ON_THE_WAY):
        importlib.import_module(name)
    delay_compiler()
    with suppress(ImportError, RuntimeError):  # without MPI the ranks talk over gloo
        import mpi4py

        mpi4py.rc.initialize = False  # a rank starts MPI itself
        importlib.import_module("mpi4py.MPI")
    of_one = {slot.name: slot for slot in TABLES if slot.key is not None and not slot.many}
    chosen = {
        f"{name}.{choice_of(slot, table)[1]}"
        for name, slot in of_one.items()
        if isinstance(table := tables.get(name, {}), dict)
    }
    for source in ours:
        if source.entry_point in chosen:
            with suppress(Exception):  # the ranks report it
                importlib.import_module(source.module)


def _unfit() -> str | None:
    """The effect of the imports that a forked process can't use, if there is one."""
    from hpctrain.base.devices import is_started

    mpi: Any = sys.modules.get("mpi4py.MPI")
    if _has_threads():
        return "started threads"
    if is_started():
        return "initialized an accelerator"
    return "initialized MPI" if mpi is not None and mpi.Is_initialized() else None


def _has_threads() -> bool:
    """Whether a fork would lose threads: not those of OpenBLAS, which ends its own before a fork and starts them again on use."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    give_up = time.monotonic() + _ENDING
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < give_up:
        time.sleep(0.001)
    return threads > 1


class ForkedRank:
    """A rank, with the methods of subprocess.Popen that the starter uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The rank's status once it has ended."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def kill(self) -> None:
        """Kill it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def fork(command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]) -> ForkedRank:
    """A rank that runs `command`, of `hpctrain`. Raises EnvironmentUnfitError."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ANSWERED)  # until the rank has its own handlers: none is lost
    try:
        pid = os.fork()
        if pid == 0:
            _become(words_behind(command), environment, descriptors, mask)
    except OSError as error:
        raise EnvironmentUnfitError(f"a rank could not be forked: {error.strerror}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return ForkedRank(pid)


def _become(
    words: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int], mask: set[Any]
) -> NoReturn:
    """Run the command with what a process that starts anew has of its own. Nothing of the starter's stack is unwound."""
    code = 1
    try:
        import numpy as np  # imported already

        os.setsid()  # Ctrl-C must reach the ranks from the starter only
        _keep_files(descriptors)
        for number in ANSWERED:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.environ.update(environment)
        set_variables()  # as the import of hpctrain.mpi does
        np.random.seed()  # Python seeds `random` anew in a forked process; torch's generator begins alike in every process
        multiprocessing.current_process().authkey = os.urandom(32)
        gc.enable()
        sys.argv[1:] = words
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)  # as `python -m hpctrain`
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _keep_files(descriptors: Sequence[int]) -> None:
    """Close the files of the starter but these and the standard streams: with its end of their pipe open, ranks would not notice
    that it has ended."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in descriptors:
            with suppress(OSError):  # the list's own
                os.close(int(name))
