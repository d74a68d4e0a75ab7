"""The watchdog of a run: no job waits in silence, and none waits forever."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

from hpctrain.mpi.errors import OperationMismatchError
from hpctrain.ranks.meeting import World
from hpctrain.ranks.watchdog.monitor import Monitor
from hpctrain.ranks.watchdog.position import Position
from hpctrain.ranks.watchdog.queries import Queries
from hpctrain.ranks.watchdog.stacks import failed_line
from hpctrain.ranks.watchdog.watcher import Watcher

LOG = logging.getLogger("hpctrain")

_FAILED = re.compile(
    r"time[d ]*out|(did|has) not finish|waited .* in the store|connection (closed|reset|refused)|broken pipe|failed in MPI"
    "|remote error",
    re.IGNORECASE,
)
"""The words of torch's, gloo's and hpctrain's own errors about other ranks that take too long or are gone."""


@contextmanager
def watched(
    world: World, position: Position, limit: float, queries: Queries
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Watch the run in this context. limit: seconds that a phase may take, or a rank may be silent. queries: those to rank 0.

    Gives a context for work that communicates: if communication fails there, by its own time limit or because a rank is gone, rank
    0 says where all ranks stand.
    """
    is_chief = world.identity.rank == 0
    watcher = Monitor(world, position, limit, queries) if is_chief else Watcher(world, position, limit)
    watcher.start()
    try:
        yield partial(_alarmed, watcher)
    finally:
        watcher.close()
        queries.close(f"the job ends after step {position.step + 1}")


@contextmanager
def _alarmed(watcher: Watcher) -> Iterator[None]:
    try:
        yield
    except OperationMismatchError:
        raise  # no rank is missing
    except RuntimeError as error:
        line = failed_line(error.__traceback__) if watcher.identity.size > 1 and _FAILED.search(str(error)) else None
        if line is not None:
            watcher.position.failure = line
            LOG.info("a communication failed", exc_info=True)
            with suppress(RuntimeError):  # the store is gone, too
                watcher.alarm(str(error).partition("\n")[0])
        raise
