"""A server of PMI-1 over socket pairs: the wire protocol through which an MPI library asks its launcher for its rank.

MPICH's own mpiexec serves PMI on a TCP port, where anybody who connects delays the start. The library only needs a
connected descriptor, named in PMI_FD, and nobody else can reach a socket pair.

Requests and replies are lines of `key=value` words. On one node, processes ask for their rank, for the mapping of ranks
to nodes, and for barriers. They `put` values under keys only if they cannot share memory, as on several nodes: there a
`PmiRelay` beside each rank passes its requests on to one `PmiBoard`, over whatever its program has.
Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale Systems", EuroMPI 2010.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from hpctrain.base.launcher_variables import RankNumbers, without_launchers
from hpctrain.base.transports import ADDED, shared_memory

__all__ = ["PmiBoard", "PmiRelay"]

FD_VARIABLE = "PMI_FD"
"""Names the descriptor over which a rank speaks with the server."""
# the longest line, in bytes. A rank that sends more is no longer served.
_LONGEST = 2**16


class PmiBoard:
    """The values and barriers of ranks, and the answers to their requests, whatever carries these. Needs a lock of its user's."""

    def __init__(self, counts: Sequence[int]) -> None:
        """counts: the ranks of each node; they are numbered node by node."""
        self.ranks = sum(counts)
        blocks = ",".join(f"({node},1,{count})" for node, count in enumerate(counts))
        self._values = {"PMI_process_mapping": f"(vector,{blocks})"}
        name = f"hpctrain_{secrets.token_hex(16)}"  # MPICH names its shared memory after it: nobody may guess it
        self._constants = {
            "init": "response_to_init rc=0 pmi_version=1 pmi_subversion=1",
            "get_maxes": "maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=4096",
            "get_appnum": "appnum rc=0 appnum=0",
            "get_my_kvsname": f"my_kvsname rc=0 kvsname={name}",
            "get_universe_size": f"universe_size rc=0 size={self.ranks}",
            "finalize": "finalize_ack rc=0",
        }
        self._in_barrier: set[int] = set()
        self.initialized: set[int] = set()
        self.finalized: set[int] = set()

    def answers(self, rank: int, line: str) -> list[tuple[int, str]]:
        """The answers that a rank's request brings about, each with the rank that gets it.

        `abort` has none: the rank exits, and the starter handles that.
        """
        words = dict(word.partition("=")[::2] for word in line.split())
        command, key = words.get("cmd", ""), words.get("key", "")
        if command == "barrier_in":
            return self._enter_barrier(rank)
        if command == "put":
            self._values[key] = words.get("value", "")
            answer = "put_result rc=0 msg=success"
        elif command == "get" and key in self._values:
            answer = f"get_result rc=0 msg=success value={self._values[key]}"
        elif command == "get":
            answer = "get_result rc=-1 msg=key_not_found value=unknown"
        elif command in self._constants:
            if command == "init":
                self.initialized.add(rank)
            elif command == "finalize":
                self.finalized.add(rank)
            answer = self._constants[command]
        else:
            answer = f"{command}_result rc=-1 msg=not_supported"
        return [] if command == "abort" else [(rank, f"cmd={answer}\n")]

    def _enter_barrier(self, rank: int) -> list[tuple[int, str]]:
        self._in_barrier.add(rank)
        if len(self._in_barrier) < self.ranks:
            return []
        self._in_barrier.clear()
        return [(other, "cmd=barrier_out rc=0\n") for other in range(self.ranks)]


class PmiServer:
    """Serves the PMI descriptors of all ranks on this node on a thread, until all ranks have exited."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._board = PmiBoard([ranks])
        self.left: list[int] = []
        """Ranks that have ended after MPI_Init without MPI_Finalize: the others would wait for them forever."""
        pairs = [socket.socketpair() for _ in range(ranks)]
        self._ours = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._thread = threading.Thread(target=self._serve, name="pmi", daemon=True)

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that MPI and hpctrain read."""
        return _variables(RankNumbers(rank, self._ranks, rank, self._ranks), self._theirs[rank], os.environ)

    def descriptors(self, rank: int) -> tuple[int, int]:
        """The descriptors that this rank must inherit: its end and the server's end.

        With the server's end open, MPI does not notice that the server has ended. MPI would end the rank at once, before
        the rank can clean up (channel_directory.py).
        """
        return self._theirs[rank].fileno(), self._ours[rank].fileno()

    def started(self) -> None:
        """Call this when all ranks have their descriptors: they are served from then on, by a thread that a fork would lose."""
        for socket_ in self._theirs:
            socket_.close()
        self._thread.start()

    def join(self, timeout: float) -> bool:
        """Wait until all ranks have exited; true if each of them finalized PMI."""
        self._thread.join(timeout)
        return len(self._board.finalized) == self._ranks

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            unread = [b""] * self._ranks
            for rank, socket_ in enumerate(self._ours):
                selector.register(socket_, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    rank = key.data
                    data = _receive(self._ours[rank])
                    *lines, unread[rank] = (unread[rank] + data).split(b"\n")
                    for line in lines:
                        for other, answer in self._board.answers(rank, line.decode("ascii", "replace")):
                            _send(self._ours[other], answer)
                    if not data or len(unread[rank]) > _LONGEST:
                        selector.unregister(self._ours[rank])
                        self._ours[rank].close()
                        if rank in self._board.initialized - self._board.finalized:
                            self.left.append(rank)


class PmiRelay:
    """A rank's PMI descriptor, whose requests another process answers, with the `PmiBoard` of ranks on several nodes."""

    def __init__(self, numbers: RankNumbers, ask: Callable[[str], str]) -> None:
        """ask: gives the answer to a line; it may wait for other ranks, and raise any Exception if there will be none."""
        self._numbers, self._ask = numbers, ask
        self._ours, self._theirs = socket.socketpair()

    def environment(self, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The rank's environment: `environment` without other launchers' variables, and with those that MPI and hpctrain read."""
        found = without_launchers(environment)
        return {**found, **_variables(self._numbers, self._theirs, found)}

    def descriptors(self) -> tuple[int, int]:
        """The descriptors that the rank must inherit; see `PmiServer.descriptors`."""
        return self._theirs.fileno(), self._ours.fileno()

    def started(self) -> None:
        """Call this when the rank has its descriptors: it is served from then on, until it has exited."""
        self._theirs.close()
        threading.Thread(target=self._serve, name="pmi", daemon=True).start()

    def _serve(self) -> None:
        unread = b""
        with self._ours:
            while (data := _receive(self._ours)) and len(unread) <= _LONGEST:
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    text = line.decode("ascii", "replace")
                    if text.startswith("cmd=abort"):
                        continue  # it has no answer
                    try:
                        _send(self._ours, self._ask(text))
                    except Exception:  # MPI tells the rank's user of the end of the connection
                        return


def _variables(numbers: RankNumbers, theirs: socket.socket, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a rank, as MPICH's mpiexec sets them. Ranks that share a node need no port."""
    added = shared_memory(environment) if numbers.local_size == numbers.size else {}
    return {
        **added,
        ADDED: " ".join(added),
        FD_VARIABLE: str(theirs.fileno()),
        "PMI_RANK": str(numbers.rank),
        "PMI_SIZE": str(numbers.size),
        "MPI_LOCALRANKID": str(numbers.local_rank),
        "MPI_LOCALNRANKS": str(numbers.local_size),
    }


def _send(socket_: socket.socket, answer: str) -> None:
    with suppress(OSError):  # it has left
        socket_.sendall(answer.encode())


def _receive(socket_: socket.socket) -> bytes:
    try:
        return os.read(socket_.fileno(), _LONGEST)
    except OSError:
        return b""
