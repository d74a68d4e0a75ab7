"""Whether the ranks of a command are forked from a process that has imported torch or each started anew, from start to start."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hpctrain.starting.fork_client import ForkServerClient
from hpctrain.starting.mpi_library import ask_library
from hpctrain.starting.processes import StartRank, spawn
from hpctrain.starting.stop_requests import StopRequests


class Forks:
    """Keeps one fork server for all starts of a command on this machine. Use it in a `with`, which ends the server."""

    def __init__(self, command: Sequence[str], tables: Mapping[str, Any]) -> None:
        """command: of `hpctrain`, as in a rank. tables: the job's."""
        self._command = command
        # elsewhere than on Linux, system libraries may not be used after a fork
        self._wanted = sys.platform == "linux" and _start_of(tables) != "spawn"
        self._server: ForkServerClient | None = None

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self) -> None:
        """Start the server, unless it runs: it imports while this process goes on."""
        if not self._wanted:
            self._server = None
        elif self._server is None or self._server.has_ended:
            self._server = ForkServerClient(self._command)

    def choose(self, requests: StopRequests) -> StartRank:
        """How a rank starts now. Waits for the server's imports, except when `requests` ask twice to end."""
        self.begin()
        if self._server is None:
            return spawn
        library = ask_library()  # while the server imports
        if library is None or library.speaks_pmi:
            if self._server.is_ready(lambda: requests.again is not None):
                return self._server.fork
        else:
            self.close()  # mpiexec starts the ranks
        self._wanted = False  # it would be the same the next time
        return spawn

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            self._server.close()


def _start_of(tables: Mapping[str, Any]) -> object:
    """[job] start. The ranks report a value that is none."""
    table = tables.get("job")
    return table.get("start") if isinstance(table, dict) else None
