"""A program of its own: runs a rank's command under mpiexec and tells how it ended, if not well.

    python supervised.py COMMAND...

mpiexec knows neither the rank of a process that was killed nor, reliably, its code: MPICH's ORs those of all ranks. Imports nothing
of hpctrain, since it stands in front of every rank.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from types import FrameType

ENDED = re.compile(rb"horovodrun: rank \S+ on \S+ ended with (exit code|signal) (\d+)")
"""The sentence that is told, for who reads mpiexec's output."""
_RANK = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2); it outlasts exec


def sentence(rank: int | str, host: str, status: int) -> str:
    """How a rank ended. status: as from subprocess.Popen."""
    return f"horovodrun: rank {rank} on {host} ended with {how(status)}"


def how(status: int) -> str:
    """A status in words."""
    return f"exit code {status}" if status >= 0 else f"signal {-status} ({signal.strsignal(-status)})"


def main(command: list[str]) -> int:
    """Run the command; its exit code, 128 + N for signal N."""
    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if process is not None:
            process.send_signal(number)

    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    this = os.getpid()

    def end_with_parent() -> None:
        if libc is not None:
            libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != this:
            os._exit(1)  # it has ended already

    # mpiexec's descriptors stay open: MPI finds one by its number
    process = subprocess.Popen(command, close_fds=False, preexec_fn=end_with_parent)
    status = process.wait()
    if status and not asked:
        rank = next((os.environ[name] for name in _RANK if name in os.environ), "?")
        print(sentence(rank, os.uname().nodename, status), file=sys.stderr, flush=True)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
