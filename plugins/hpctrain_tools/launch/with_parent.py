"""A program of its own: runs a command that ends, by SIGTERM, when the process that started it ends. Linux only.

    python with_parent.py PID COMMAND...

PID is the parent's. mpiexec is started so: it would outlive a starter that is killed, with its ranks on all hosts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2); it outlasts exec


def main(parent: int, command: list[str]) -> None:
    """Become the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() == parent:  # else it has ended already
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
