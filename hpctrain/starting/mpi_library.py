"""Detects which MPI library mpi4py loads, and whether this library speaks PMI."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from hpctrain.base.child_python import python_code
from hpctrain.starting.pmi import PmiServer

__all__ = ["ask_library"]

MPICH, OPEN_MPI = "MPICH", "Open MPI"
_SECONDS = 60.0

_QUESTION = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.get_vendor()[0], flush=True)
if MPI.get_vendor()[0] != "Open MPI":
    MPI.Init()
    MPI.Finalize()
"""


@dataclass(frozen=True)
class MpiLibrary:
    """speaks_pmi: false for an MPICH that was built for PMIx or for a site's own launcher."""

    flavour: str
    speaks_pmi: bool


@cache
def ask_library() -> MpiLibrary | None:
    """Start MPI in a separate process, since the starter itself must not start MPI. None if there is no MPI library.

    A process asks once: the answer holds for restarts.
    """
    server = PmiServer(1)
    question = subprocess.Popen(
        python_code(_QUESTION),
        env={**os.environ, **server.environment(0)},
        pass_fds=server.descriptors(0),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # Ctrl-C must reach the starter only
    )
    server.started()
    assert question.stdout is not None
    name = question.stdout.readline().strip()
    with suppress(subprocess.TimeoutExpired):
        question.wait(_SECONDS)
    question.kill()
    question.wait()
    question.stdout.close()
    if not name:
        return None
    # MPICH's relatives (Intel, Cray, MVAPICH) share its launcher
    return MpiLibrary(OPEN_MPI if name == OPEN_MPI else MPICH, server.join(1.0))
