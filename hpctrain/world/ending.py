"""Ends the process of a finished rank."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn


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
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Flush the output as far as possible."""
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with contextlib.suppress(OSError, ValueError):  # no space left, no reader, or closed
            stream.flush()
