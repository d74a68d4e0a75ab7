"""init, shutdown, and who this process is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpctrain_horovod.common import process_sets as sets
from hpctrain_horovod.common.process_sets import ProcessSet
from hpctrain_horovod.engine import runtime


def init(comm: Any = None, process_sets: Sequence[ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Start communicating with the other processes of the job, which all call this. A second call only looks the sets up.

    comm: ranks of MPI's world, or an mpi4py communicator; every process of MPI's world calls init, each with its own.
    process_sets: sets of ranks to register now, or "dynamic" to allow `add_process_set` later.
    Raises ValueError for a comm without this process, and for process sets of ranks that do not exist; for a set that is given
    twice too, but then Horovod is initialized, with each set registered once.
    """
    dynamic = isinstance(process_sets, str)
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f'found process_sets={process_sets!r}, expected a list of process sets or "dynamic"')
    given = [] if process_sets is None or isinstance(process_sets, str) else process_sets
    if runtime.is_running():
        sets.look_up(given)
        return
    runtime.start(comm, dynamic)
    try:
        twice = sets.initialize(given)
    except BaseException:
        shutdown()
        raise
    if twice:
        raise ValueError(
            f"found process sets of the ranks {', '.join(map(str, twice))} more than once (all ranks are a set, too), "
            "expected each once; Horovod is initialized, and has registered each once"
        )


def shutdown() -> None:
    """Stop communicating. Operations in flight fail on all ranks; `init` may follow."""
    runtime.stop()
    sets.forget()


def is_initialized() -> bool:
    """Whether `init` was called, and `shutdown` was not called since."""
    return runtime.is_running()


def size() -> int:
    """The number of processes. Like all functions below, raises ValueError before `init`."""
    return runtime.known().world.size


def rank() -> int:
    """This process's number, from 0."""
    return runtime.known().world.rank


def local_size() -> int:
    """The number of processes on this node."""
    return runtime.known().world.local_size


def local_rank() -> int:
    """This process's number on its node, from 0."""
    return runtime.known().world.local_rank


def cross_size() -> int:
    """The number of nodes that have a process of this local rank."""
    return runtime.known().world.cross_size


def cross_rank() -> int:
    """This node's number among those that have a process of this local rank."""
    return runtime.known().world.cross_rank


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of processes."""
    return runtime.known().world.homogeneous


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads: always, for the engine does so."""
    runtime.known()
    return True


def mpi_enabled() -> bool:
    """Whether operations run over MPI."""
    return runtime.known().world.uses_mpi


def gloo_enabled() -> bool:
    """Whether operations run over gloo."""
    return not runtime.known().world.uses_mpi


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write the operations' history to a file that Chrome's trace viewer reads; rank 0 writes. Raises OSError."""
    active = runtime.known()
    if active.world.rank == 0:
        active.timeline.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Finish the file of `start_timeline`."""
    runtime.known().timeline.stop()
