"""How a process that communicates ends: cleanly when all is well, and never by hanging in MPI_Finalize.

- An uncaught exception on one rank ends all ranks at once: the others would wait for it for ever.
- A rank that gave up on an operation (a timeout) aborts at exit, since MPI cannot cancel the operation.
- A script that forgets destroy_process_group ends as if it had called it.
"""

from __future__ import annotations

import atexit
import socket
import sys
import traceback
import weakref
from types import TracebackType
from typing import Protocol

import torch.distributed as dist

from hpctrain.errors import HpctrainError
from hpctrain.mpi.library import MPI, abort


class Group(Protocol):
    """A group's view of the operations that were submitted to it."""

    @property
    def broken(self) -> bool:
        """Whether MPI still holds an operation that this process has given up."""

    def finish(self) -> None:
        """Wait for all of them."""


_groups: weakref.WeakSet[Group] = weakref.WeakSet()


def finish_at_exit(group: Group) -> None:
    """Let the process end only when the group's operations have."""
    _groups.add(group)


def install() -> None:
    """Take over uncaught exceptions, unless somebody has already."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _abort_world


def _abort_world(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # init_process_group wraps this hook and shows what it printed only after it returned, which it does not: so print
    # past it, on the real stderr.
    rank = MPI.COMM_WORLD.rank
    lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
    text = "\n".join(f"[rank {rank} on {socket.gethostname()}] {line}" for line in lines)
    stream = sys.__stderr__ or sys.stderr
    print(text, file=stream, flush=True)
    if MPI.COMM_WORLD.size == 1:
        return  # nobody waits for this rank: Python ends it with status 1
    abort(error.exit_code if isinstance(error, HpctrainError) else 1)


@atexit.register
def _leave() -> None:
    if MPI.Is_finalized():
        return
    for group in list(_groups):
        if not group.broken:
            group.finish()
    if any(group.broken for group in _groups):
        print(
            f"[rank {MPI.COMM_WORLD.rank}] an operation that timed out is still held by MPI: ending all ranks",
            file=sys.stderr,
        )
        abort(1)
    if dist.is_initialized():
        dist.destroy_process_group()
