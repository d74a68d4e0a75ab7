"""Ends a process that communicates: cleanly after success, and never hanging in MPI_Finalize.

- An uncaught exception on one rank ends all ranks at once: the others would wait for that rank for ever.
- A rank that gave up on an operation (a timeout) aborts at exit, since MPI cannot cancel the operation.
- A script that forgets destroy_process_group ends as if it had called the function.
"""

from __future__ import annotations

import atexit
import socket
import sys
import traceback
import weakref
from types import TracebackType
from typing import Any

import torch.distributed as dist

from hpctrain.base.errors import HpctrainError
from hpctrain.mpi.library import MPI, abort

groups: weakref.WeakSet[Any] = weakref.WeakSet()
"""MPIProcessGroups, whose operations are waited for at exit."""


def install() -> None:
    """Handle uncaught exceptions, unless another hook is installed."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _abort_world


def _abort_world(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # init_process_group wraps this hook and shows its output only after it returns. It does not return, so print on the
    # real stderr.
    rank = MPI.COMM_WORLD.rank
    lines = "".join(traceback.format_exception(kind, error, trace)).splitlines()
    text = "\n".join(f"[rank {rank} on {socket.gethostname()}] {line}" for line in lines)
    stream = sys.__stderr__ or sys.stderr
    print(text, file=stream, flush=True)
    if MPI.COMM_WORLD.size == 1:
        return  # no other rank waits for this one: Python ends it with status 1
    abort(error.exit_code if isinstance(error, HpctrainError) else 1)


@atexit.register
def _leave() -> None:
    if MPI.Is_finalized():
        return
    for group in list(groups):
        if not group.broken:
            group.finish()
    if any(group.broken for group in groups):
        print(
            f"[rank {MPI.COMM_WORLD.rank}] MPI still holds an operation that timed out: ending all ranks",
            file=sys.stderr,
        )
        abort(1)
    if dist.is_initialized():
        dist.destroy_process_group()
