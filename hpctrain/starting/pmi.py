"""A server of PMI-1 over socket pairs: the wire protocol through which an MPI library asks its launcher for its rank.

MPICH's own mpiexec serves PMI on a TCP port, where anybody who connects delays the start. The library only needs a
connected descriptor, named in PMI_FD, and nobody else can reach a socket pair.

Requests and replies are lines of `key=value` words. On one node, processes ask for their rank, for the mapping of ranks
to nodes, and for barriers. They `put` values under keys only if they cannot share memory.
Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale Systems", EuroMPI 2010.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import threading
from contextlib import suppress

from hpctrain.base.transports import ADDED, shared_memory

FD_VARIABLE = "PMI_FD"
"""Names the descriptor over which a rank speaks with the server."""
_LONGEST = 2**16
"""The longest line, in bytes. A rank that sends more is no longer served."""


class PmiServer:
    """Serves the PMI descriptors of all ranks on a thread, until all ranks have exited."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._values = {"PMI_process_mapping": f"(vector,(0,1,{ranks}))"}  # one block: all ranks on this node
        name = f"hpctrain_{secrets.token_hex(16)}"  # MPICH names its shared memory after it: nobody may guess it
        self._constants = {
            "init": "response_to_init rc=0 pmi_version=1 pmi_subversion=1",
            "get_maxes": "maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=4096",
            "get_appnum": "appnum rc=0 appnum=0",
            "get_my_kvsname": f"my_kvsname rc=0 kvsname={name}",
            "get_universe_size": f"universe_size rc=0 size={ranks}",
            "finalize": "finalize_ack rc=0",
        }
        self._in_barrier: set[int] = set()
        self._initialized: set[int] = set()
        self._finalized: set[int] = set()
        self.left: list[int] = []
        """Ranks that have ended after MPI_Init without MPI_Finalize: the others would wait for them forever."""
        pairs = [socket.socketpair() for _ in range(ranks)]
        self._ours = [ours for ours, _ in pairs]
        self._theirs = [theirs for _, theirs in pairs]
        self._thread = threading.Thread(target=self._serve, name="pmi", daemon=True)
        self._thread.start()

    def environment(self, rank: int) -> dict[str, str]:
        """The variables that MPI and hpctrain read, as MPICH's mpiexec sets them. Ranks that share a node need no port."""
        added = shared_memory(os.environ)
        return {
            **added,
            ADDED: " ".join(added),
            FD_VARIABLE: str(self._theirs[rank].fileno()),
            "PMI_RANK": str(rank),
            "PMI_SIZE": str(self._ranks),
            "MPI_LOCALRANKID": str(rank),
            "MPI_LOCALNRANKS": str(self._ranks),
        }

    def descriptors(self, rank: int) -> tuple[int, int]:
        """The descriptors that this rank must inherit: its end and the server's end.

        With the server's end open, MPI does not notice that the server has ended. MPI would end the rank at once, before
        the rank can clean up (starting/channel_directory.py).
        """
        return self._theirs[rank].fileno(), self._ours[rank].fileno()

    def started(self) -> None:
        """Call this when all ranks have their descriptors: from then on, the server notices when a rank exits."""
        for socket_ in self._theirs:
            socket_.close()

    def join(self, timeout: float) -> bool:
        """Wait until all ranks have exited; true if each of them finalized PMI."""
        self._thread.join(timeout)
        return len(self._finalized) == self._ranks

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
                        self._answer(rank, line.decode("ascii", "replace"))
                    if not data or len(unread[rank]) > _LONGEST:
                        selector.unregister(self._ours[rank])
                        self._ours[rank].close()
                        if rank in self._initialized - self._finalized:
                            self.left.append(rank)

    def _answer(self, rank: int, line: str) -> None:
        """Answer the rank's command. `abort` needs no answer: the rank exits, and the starter handles that."""
        words = dict(word.partition("=")[::2] for word in line.split())
        command, key = words.get("cmd", ""), words.get("key", "")
        if command == "barrier_in":
            self._enter_barrier(rank)
        elif command == "put":
            self._values[key] = words.get("value", "")
            self._send(rank, "put_result rc=0 msg=success")
        elif command == "get" and key in self._values:
            self._send(rank, f"get_result rc=0 msg=success value={self._values[key]}")
        elif command == "get":
            self._send(rank, "get_result rc=-1 msg=key_not_found value=unknown")
        elif command in self._constants:
            if command == "init":
                self._initialized.add(rank)
            elif command == "finalize":
                self._finalized.add(rank)
            self._send(rank, self._constants[command])
        elif command != "abort":
            self._send(rank, f"{command}_result rc=-1 msg=not_supported")

    def _enter_barrier(self, rank: int) -> None:
        self._in_barrier.add(rank)
        if len(self._in_barrier) == self._ranks:
            self._in_barrier.clear()
            for other in range(self._ranks):
                self._send(other, "barrier_out rc=0")

    def _send(self, rank: int, answer: str) -> None:
        with suppress(OSError):  # it has left
            self._ours[rank].sendall(f"cmd={answer}\n".encode())


def _receive(socket_: socket.socket) -> bytes:
    try:
        return os.read(socket_.fileno(), _LONGEST)
    except OSError:
        return b""
