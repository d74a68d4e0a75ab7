"""The end of this process."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
import time
from typing import NoReturn

from hpctrain.base.launcher_variables import by_srun, pmi_descriptor
from hpctrain.contracts.identity import Identity


def end_process(code: int) -> NoReturn:
    """End this rank with `code` as Python would, but without finalizing the interpreter.

    Gloo's threads free the tensors of their last operations slightly later, and need the interpreter to do so. Python ends
    a thread that asks for the interpreter during finalization. In the middle of C++ code this aborts the process: a rank
    that had finished would exit with 134.
    """
    # Python's own exit begins with these two steps; the first joins the threads and closes thread pools
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
        _finalize_pmi()
    flush_output()
    os._exit(code)


def _finalize_pmi() -> None:
    """Tell MPICH's mpiexec, or the starter, that this process ends well, as MPICH 5 does in a handler of exit(), which os._exit
    leaves out. Otherwise mpiexec would kill the other ranks of the node."""
    descriptor = pmi_descriptor()
    if descriptor is None:
        return
    # OSError: another MPICH has closed it
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.settimeout(1.0)
        connection.sendall(b"cmd=finalize\n")
        connection.recv(1024)  # the acknowledgement


def flush_output() -> None:
    """Flush the output as far as possible."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # no space left, no reader, or closed
            stream.flush()


def end_now(identity: Identity, code: int, everybody: bool) -> NoReturn:
    """Exit without cleaning up. Under MPI the launcher ends the other ranks, unless `everybody` leaves."""
    # srun turns every code given to Abort into 137
    if identity.source == "mpi" and identity.size > 1 and not (everybody and by_srun()):
        from hpctrain.mpi.library import abort

        abort(code)
    flush_output()
    if identity.rank == 0 and identity.size > 1:
        time.sleep(1)  # this rank serves the store: the others still read which rank failed
    os._exit(code)
