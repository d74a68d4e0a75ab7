"""The client of the guarded store: a torch.distributed Store, so that gloo, NCCL and MPI groups can use it, too."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hpctrain.base.errors import name_ranks
from hpctrain.base.store.messages import (
    DIGEST_BYTES,
    GREETING_HEADER,
    LATE,
    LENGTH,
    MAGIC,
    NONCE_BYTES,
    NUMBER,
    SECONDS,
    WRONG,
    ProtocolError,
    digest,
    endpoint,
    frame,
    unpack,
    verify,
)

if TYPE_CHECKING:
    from hpctrain.base.store.server import StoreServer

__all__ = ["GuardedStore", "await_members", "missing_keys", "open_store"]

_SLACK = 10.0  # seconds that an answer may take beyond the server's own time limit: rank 0 may be busy
_PATIENCE = 300.0  # seconds for the answer to a request that does not wait for keys
# seconds for one address: a firewall may drop packets instead of refusing them, or a program listen and never answer
_ATTEMPT = 2.0
_ANOTHER = 60.0  # seconds for an additional connection of a rank that has joined
_LONGEST_WAIT = 1e8  # seconds; the system counts nanoseconds in 64 bits

Address = tuple[str, int]
FindSecret = Callable[[bytes], bytes | None]
"""Maps the server's introduction to the secret; None if the introduction is not this user's."""


# stores in use, kept alive here: torch's groups hold only the C++ half of a store, which needs the Python half
_open: set[GuardedStore] = set()


class Connection:
    """An authenticated connection; requests and replies take turns on it."""

    def __init__(self, address: Address, find_secret: FindSecret, seconds: float) -> None:
        """Connect and shake hands within `seconds`. Raises OSError, or ProtocolError if the other end is no rank of this job."""
        self._give_up = time.monotonic() + seconds
        self._socket = socket.create_connection(address, timeout=seconds)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.local_host, self.remote_host = str(self._socket.getsockname()[0]), str(self._socket.getpeername()[0])
            self._shake_hands(find_secret)
        except BaseException:
            self._socket.close()
            raise

    def ask(self, request: Sequence[bytes], seconds: float) -> list[bytes]:
        """Send `request` and wait up to `seconds` for the reply."""
        self._give_up = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(frame(request))
        return unpack(self._read(*LENGTH.unpack(self._read(LENGTH.size))))

    def close(self) -> None:
        self._socket.close()

    def _shake_hands(self, find_secret: FindSecret) -> None:
        magic, theirs, length = GREETING_HEADER.unpack(self._read(GREETING_HEADER.size))
        if magic != MAGIC:
            raise ProtocolError("another program listens there")
        introduction = self._read(length)
        secret = find_secret(introduction)
        if secret is None:
            raise ProtocolError("it is not this job's")
        mine = secrets.token_bytes(NONCE_BYTES)
        nonces, server = theirs + mine, endpoint(self._socket.getpeername())
        self._socket.sendall(mine + digest(secret, b"client", nonces, introduction, server))
        if not verify(self._read(DIGEST_BYTES), secret, b"server", nonces, introduction, server):
            raise ProtocolError("it does not know this job's secret")
        self.secret = secret

    def _read(self, count: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < count:
            self._socket.settimeout(max(self._give_up - time.monotonic(), 0.001))
            chunk = self._socket.recv(min(count - len(chunks), 2**20))
            if not chunk:
                raise ConnectionResetError("the other end closed the connection")
            chunks += chunk
        return bytes(chunks)


class GuardedStore(Store):
    """The store for any number of threads; each request has a connection of its own.

    Raises torch's DistStoreError when a key is not set in time or a request is invalid, and DistNetworkError when rank 0
    cannot be reached. After that, every call raises DistNetworkError at once.
    """

    def __init__(self, address: Address, timeout: timedelta, first: Connection, patience: float = _PATIENCE) -> None:
        """timeout: of waits for keys. patience: seconds for the answer to a request that does not wait for keys."""
        super().__init__()
        self._patience, self._slack, self._more = patience, min(_SLACK, patience), min(_ANOTHER, patience)
        self.set_timeout(timeout)
        self.address, self.local_host, self.remote_host = address, first.local_host, first.remote_host
        self.secret = first.secret
        self._idle = [first]
        self._lost: Exception | None = None
        self._lock = threading.Lock()
        self.server: StoreServer | None = None
        """The server, on rank 0; `close` stops it."""
        _open.add(self)

    def serve(self, server: StoreServer, hosts: Collection[str]) -> None:
        """This is rank 0's store. hosts: the addresses of this host at which the other ranks have connected."""
        self.server, self.local_host = server, min(hosts, default=self.local_host)

    def close(self) -> None:
        """Close the connections; on rank 0 this also stops the server for all ranks."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
        if self.server is not None:
            self.server.close()
        _open.discard(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(b"set", key.encode(), _as_bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of `keys`; like `get`, waits for missing keys."""
        return self._ask_in_time(b"get", keys)

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        pairs = zip(keys, values, strict=True)
        self._ask(b"set", *(part for key, value in pairs for part in (key.encode(), _as_bytes(value))))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(b"append", key.encode(), _as_bytes(value))

    def add(self, key: str, amount: int) -> int:
        return int(NUMBER.unpack(self._ask(b"add", key.encode(), NUMBER.pack(amount))[0])[0])

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(b"compare_set", key.encode(), _as_bytes(expected), _as_bytes(desired))[0]

    def check(self, keys: list[str]) -> bool:
        return bool(NUMBER.unpack(self._ask(b"check", *(key.encode() for key in keys))[0])[0])

    def delete_key(self, key: str) -> bool:
        return bool(NUMBER.unpack(self._ask(b"delete", key.encode())[0])[0])

    def num_keys(self) -> int:
        return int(NUMBER.unpack(self._ask(b"count")[0])[0])

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815  (torch's C++ looks them up by these names)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._ask_in_time(b"wait", keys, timeout)

    def has_extended_api(self) -> bool:
        """True: append, multi_get and multi_set exist, so gloo asks for all addresses at once."""
        return True

    def another(self, patience: float) -> GuardedStore:
        """The same keys over connections of its own, which give up after `patience` seconds."""
        return GuardedStore(self.address, self.timeout, self._another(), patience)  # type: ignore[attr-defined]

    def clone(self) -> GuardedStore:
        """This store: NCCL's threads ask for their own copy, but one store serves any number of threads."""
        return self

    def _ask_in_time(self, name: bytes, keys: Sequence[str], timeout: timedelta | None = None) -> list[bytes]:
        """timeout: by default the store's own."""
        limit = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]  # torch's stub lacks it
        seconds = min(limit.total_seconds(), _LONGEST_WAIT)
        request = (name, SECONDS.pack(seconds), *(key.encode() for key in keys))
        status, *parts = self._exchange(request, seconds + self._slack)
        if status == LATE:
            missing = ", ".join(part.decode(errors="replace") for part in parts)
            raise dist.DistStoreError(f"waited {seconds:g} s in the store for: {missing}")
        return parts

    def _ask(self, *request: bytes) -> list[bytes]:
        return self._exchange(request, self._patience)[1:]

    def _exchange(self, request: Sequence[bytes], seconds: float) -> list[bytes]:
        connection: Connection | None = None
        try:
            if self._lost is not None:
                raise self._lost
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                connection = self._another()
            reply = connection.ask(request, seconds)
        except (OSError, ProtocolError) as error:
            if connection is not None:
                connection.close()
            if not isinstance(error, TimeoutError):  # rank 0 may just be busy
                self._lost = error
            raise dist.DistNetworkError(
                f"the store on rank 0 ({self.address[0]} port {self.address[1]}) does not answer: {error}"
            ) from error
        with self._lock:
            self._idle.append(connection)
        if reply[0] == WRONG:
            raise dist.DistStoreError(f"the store can't do that: {reply[1].decode()}")
        return reply

    def _another(self) -> Connection:
        """A new connection. A server that refuses it has ended; a server that hangs up may be flooded with connections."""
        give_up = time.monotonic() + self._more
        while True:
            try:
                return Connection(self.address, lambda _: self.secret, self._more)
            except ConnectionRefusedError:
                raise
            except (OSError, ProtocolError):
                if time.monotonic() > give_up:
                    raise
                time.sleep(0.05)


def open_store(
    addresses: Sequence[Address], find_secret: FindSecret, seconds: float, timeout: timedelta
) -> GuardedStore:
    """The store of this job's server at the first of `addresses` that answers; tries all in turn for `seconds`.

    timeout: the limit of waits for keys. Raises the OSError or ProtocolError of the last attempt.
    """
    give_up = time.monotonic() + seconds
    last: Exception = OSError("it has no address")
    while addresses:
        for address in addresses:
            try:
                return GuardedStore(address, timeout, Connection(address, find_secret, _ATTEMPT))
            except (OSError, ProtocolError) as error:
                last = error
            if time.monotonic() > give_up:
                raise last
        time.sleep(0.05)
    raise last


def missing_keys(store: Store, keys: Sequence[str], limit: timedelta) -> list[int]:
    """The places of the keys that are not set within `limit`."""
    try:
        store.wait(list(keys), limit)
    except dist.DistStoreError:
        return [place for place, key in enumerate(keys) if not store.check([key])]
    return []


def await_members(options: Any) -> Store:
    """A store of a new group alone, once all its ranks are in here: gloo and MPI would not say who is missing.

    options: torch's `_DistributedBackendOptions`. Raises DistStoreError with the missing ranks after their timeout.
    """
    rank, ranks = options.group_rank, list(options.global_ranks_in_group) or [*range(options.group_size)]
    # a group that is made again after its destruction gets the same name and store from torch, old keys included
    made = f"made/{rank}"
    store = PrefixStore(str(options.store.add(made, 1)), options.store)
    keys = [f"here/{member}" for member in range(len(ranks))]
    store.set(keys[rank], "")
    if absent := missing_keys(store, keys, options.timeout):
        store.delete_key(keys[rank])
        options.store.add(made, -1)  # undo the attempt, so that all ranks can try again
        raise dist.DistStoreError(
            f"group {options.group_id!r} of {name_ranks(ranks)} was not complete within {options.timeout.total_seconds():g} s: "
            f"{name_ranks([ranks[place] for place in absent])} did not create it; new_group must be called by all ranks, in the "
            "same order"
        )
    return store


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
