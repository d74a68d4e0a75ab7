"""The messages of a negotiation over TCP, for ranks without MPI: each rank is connected to its parent and its children.

Both ends of a connection first prove that they know the job's secret.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from hpctrain.base.store.messages import DIGEST_BYTES, ProtocolError, digest, verify
from hpctrain.base.store.network import listeners
from hpctrain_horovod.engine.links import END, children_of, encode, parent_of

_NONCE_BYTES = 32
_HEADER = struct.Struct("<Q")
_GREETING = struct.Struct(f"<I{_NONCE_BYTES}s")
_HANDSHAKE = 5.0  # seconds for one connection to prove itself
_CONNECT = 60.0  # seconds for all connections


class SocketLinks:
    """Messages along the tree of a process set."""

    def __init__(self, store: Store, secret: bytes, host: str, rank: int, size: int) -> None:
        """host: this rank's address, at which its children reach it. Collective over the set.

        Raises OSError or DistStoreError if a rank does not connect in time.
        """
        self.rank, self.size = rank, size
        self._secret = secret
        self._sockets: dict[int, socket.socket] = {}
        self._unread: dict[int, bytearray] = {}
        self._selector = selectors.DefaultSelector()
        give_up = time.monotonic() + _CONNECT
        children, parent = children_of(rank, size), parent_of(rank)
        waiting: list[socket.socket] = []
        if children:
            waiting = listeners([host])
            store.set(f"address/{rank}", json.dumps(waiting[0].getsockname()[:2]))
        if parent is not None:
            store.wait([f"address/{parent}"], timedelta(seconds=_CONNECT))
            there, port = json.loads(store.get(f"address/{parent}"))
            self._add(parent, self._call((there, port)))
        while len(self._sockets) < len(children) + (parent is not None):
            self._answer(waiting[0], children, give_up)
        for one in waiting:
            one.close()

    def send(self, rank: int, message: bytes) -> None:
        with suppress(OSError):  # it has ended: `receive` says so
            self._sockets[rank].sendall(_HEADER.pack(len(message)) + message)

    def flush(self, rank: int) -> None:
        """Nothing to do: `send` has given all to the system."""

    def receive(self) -> tuple[int, bytes] | None:
        while True:
            for rank, unread in self._unread.items():
                if len(unread) >= _HEADER.size:
                    end = _HEADER.size + _HEADER.unpack_from(unread)[0]
                    if len(unread) >= end:
                        message = bytes(unread[_HEADER.size : end])
                        del unread[:end]
                        return rank, message
            ready = self._selector.select(0)
            if not ready:
                return None
            for key, _ in ready:
                try:
                    data = self._sockets[key.data].recv(2**20)
                except OSError:
                    data = b""
                if not data:
                    self._selector.unregister(self._sockets[key.data])
                    return key.data, encode(
                        END, f"Horovod has been shut down: the connection to rank {key.data} was lost"
                    )
                self._unread[key.data] += data

    def close(self) -> None:
        """Close all connections; the other ends notice."""
        self._selector.close()
        for one in self._sockets.values():
            one.close()

    def _add(self, rank: int, connection: socket.socket) -> None:
        connection.settimeout(_CONNECT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets[rank], self._unread[rank] = connection, bytearray()
        self._selector.register(connection, selectors.EVENT_READ, rank)

    def _call(self, address: tuple[str, int]) -> socket.socket:
        """A connection to the parent."""
        connection = socket.create_connection(address, timeout=_CONNECT)
        mine = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(_GREETING.pack(self.rank, mine))
        theirs = _read(connection, _NONCE_BYTES)
        if not verify(_read(connection, DIGEST_BYTES), self._secret, b"parent", mine, theirs):
            raise ProtocolError("it does not know this job's secret")
        connection.sendall(digest(self._secret, b"child", mine, theirs))
        return connection

    def _answer(self, listener: socket.socket, children: Sequence[int], give_up: float) -> None:
        """Accept a connection, and keep it if it is a child's."""
        listener.settimeout(max(give_up - time.monotonic(), 0.001))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = [child for child in children if child not in self._sockets]
            raise TimeoutError(f"ranks {missing} did not connect within {_CONNECT:g} s") from None
        try:
            connection.settimeout(_HANDSHAKE)
            child, theirs = _GREETING.unpack(_read(connection, _GREETING.size))
            mine = secrets.token_bytes(_NONCE_BYTES)
            connection.sendall(mine + digest(self._secret, b"parent", theirs, mine))
            proof = _read(connection, DIGEST_BYTES)
            if (
                child not in children
                or child in self._sockets
                or not verify(proof, self._secret, b"child", theirs, mine)
            ):
                raise ProtocolError("it is no rank of this job")
            self._add(child, connection)
        except (OSError, ProtocolError):
            connection.close()  # a stranger


def _read(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        data = connection.recv(count - len(found))
        if not data:
            raise ConnectionResetError("the other end closed the connection")
        found += data
    return bytes(found)
