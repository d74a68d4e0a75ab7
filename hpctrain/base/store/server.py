"""The server of the guarded store: a thread of rank 0 that holds the keys and serves clients that know the secret."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import resource
import secrets
import socket
import struct
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any

from hpctrain.base.store.messages import (
    DIGEST_BYTES,
    GREETING_HEADER,
    LATE,
    LENGTH,
    MAGIC,
    NONCE_BYTES,
    NUMBER,
    OK,
    SECONDS,
    WRONG,
    ProtocolError,
    digest,
    endpoint,
    frame,
    unpack,
    verify,
)

__all__ = ["StoreServer"]

_HANDSHAKE_SECONDS = 30.0  # long, because rank 0 may compute meanwhile and hold the interpreter lock
# connections in their handshake at a time, besides one for each rank. A newer connection replaces the oldest; a rank that
# loses its connection tries again.
_UNPROVEN = 256
_ACCEPTED_AT_ONCE = 64  # connections that asyncio accepts before it serves any of them
_WAITING = 1024  # connections that the system queues for the server
_ANSWER_SECONDS = 30.0  # time limit of calls into the server's own thread, in seconds
# seconds before a task is cancelled again: up to Python 3.11, wait_for ignores a cancellation once its awaitable is done
_CANCEL_SECONDS = 0.1
_SPARE_FILES = 256  # files that this process opens for other purposes

LOG = logging.getLogger("hpctrain")

Reply = list[bytes]

_FROM_STRANGERS = (ProtocolError, asyncio.IncompleteReadError, asyncio.TimeoutError, OSError)


class Contents:
    """The keys and values of the store, and its requests. Runs on the server's event loop.

    A request is a list of byte strings that begins with its name; a reply is a list that begins with OK, LATE or WRONG.

    Counters are stored as decimal digits, as in TCPStore.
    """

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._arrivals: dict[bytes, asyncio.Event] = {}
        self._requests: dict[bytes, Callable[..., Reply | Awaitable[Reply]]] = {
            b"set": self._set,
            b"get": self._get,
            b"add": self._add,
            b"append": self._append,
            b"compare_set": self._compare_set,
            b"delete": self._delete,
            b"check": self._check,
            b"wait": self._wait,
            b"count": self._count,
        }

    async def answer(self, request: Sequence[bytes]) -> Reply:
        """Carry a request out; WRONG and the reason if it is invalid."""
        try:
            reply = self._requests[request[0]](*request[1:])
            return await reply if isinstance(reply, Awaitable) else reply
        except (LookupError, TypeError, ValueError, struct.error) as error:
            return [WRONG, str(error).encode()]

    def _put(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        arrival = self._arrivals.pop(key, None)
        if arrival is not None:
            arrival.set()

    def _set(self, *pairs: bytes) -> Reply:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._put(key, value)
        return [OK]

    async def _get(self, seconds: bytes, *keys: bytes) -> Reply:
        """All values, once all keys are set."""
        reply = await self._wait(seconds, *keys)
        return reply if reply[0] == LATE else [OK, *(self._values.get(key, b"") for key in keys)]

    def _add(self, key: bytes, amount: bytes) -> Reply:
        total = int(self._values.get(key, b"0")) + NUMBER.unpack(amount)[0]
        reply = [OK, NUMBER.pack(total)]  # first: fails before anything has changed if the total is too large
        self._put(key, str(total).encode())
        return reply

    def _append(self, key: bytes, value: bytes) -> Reply:
        self._put(key, self._values.get(key, b"") + value)
        return [OK]

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> Reply:
        """Set a key whose value is `expected` (empty: a missing key, too); the reply is its value afterwards."""
        if self._values.get(key, b"") == expected:
            self._put(key, desired)
        return [OK, self._values.get(key, expected)]

    def _delete(self, key: bytes) -> Reply:
        return [OK, NUMBER.pack(self._values.pop(key, None) is not None)]

    def _check(self, *keys: bytes) -> Reply:
        return [OK, NUMBER.pack(all(key in self._values for key in keys))]

    def _count(self) -> Reply:
        return [OK, NUMBER.pack(len(self._values))]

    async def _wait(self, seconds: bytes, *keys: bytes) -> Reply:
        """OK once all keys are set; LATE and the missing keys when the time is up."""
        try:
            await asyncio.wait_for(self._all_there(keys), SECONDS.unpack(seconds)[0])
        except asyncio.TimeoutError:
            return [LATE, *(key for key in keys if key not in self._values)]
        return [OK]

    async def _all_there(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            while key not in self._values:
                await self._arrivals.setdefault(key, asyncio.Event()).wait()


class StoreServer:
    """Listens on `listeners` from construction to `close`.

    introduction: sent to all who connect; a rank needs it to find the secret. Each host without a valid proof is logged once.
    """

    def __init__(
        self, secret: bytes, listeners: Iterable[socket.socket], ranks: int, introduction: bytes = b""
    ) -> None:
        self._secret, self._introduction = secret, introduction
        self._contents = Contents()
        self.refused: list[str] = []  # sentences about connections: there may be no log yet
        self._unproven: OrderedDict[asyncio.StreamWriter, None] = OrderedDict()
        self._serving: set[asyncio.Task[None]] = set()
        self._most_unproven = _UNPROVEN + ranks
        self._strangers: set[str] = set()
        self._listeners: list[asyncio.Server] = []
        self.addresses: list[tuple[str, int]] = []
        """The hosts and ports at which the server listens."""
        self._process = os.getpid()
        allow_open_files(files_needed(ranks))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store server", daemon=True)
        self._thread.start()
        self._run(self._listen(list(listeners)))
        atexit.register(self.close)

    def close(self) -> None:
        """Stop serving and end all connections. Does nothing in a forked process, which does not have the thread."""
        atexit.unregister(self.close)
        if os.getpid() == self._process and not self._loop.is_closed():
            self._run(self._stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_SECONDS)

    async def _listen(self, listeners: list[socket.socket]) -> None:
        for listener in listeners:
            self.addresses.append(listener.getsockname()[:2])
            self._listeners.append(await asyncio.start_server(self._serve, sock=listener, backlog=_ACCEPTED_AT_ONCE))
            listener.listen(_WAITING)

    async def _stop(self) -> None:
        for listener in self._listeners:
            listener.close()
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._serving:  # one that has not begun would end with a traceback
                task.cancel()
            await asyncio.wait(tasks, timeout=_CANCEL_SECONDS)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, from its handshake until either side closes it or the server stops."""
        task, peer = asyncio.current_task(), writer.get_extra_info("peername") or ("an unknown address", 0)
        assert task is not None
        self._serving.add(task)
        self._unproven[writer] = None
        if len(self._unproven) > self._most_unproven:  # the oldest makes room
            self._unproven.popitem(last=False)[0].transport.abort()
        try:
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.wait_for(self._shake_hands(reader, writer), _HANDSHAKE_SECONDS)
            await self._answer(reader, writer)
        except asyncio.CancelledError:
            pass  # asyncio would print a traceback
        except _FROM_STRANGERS as error:
            # else it was closed to make room, or is a rank that is gone, as its launcher knows
            if writer in self._unproven or isinstance(error, ProtocolError):
                self._tell_of_stranger(peer, error)
        finally:
            self._unproven.pop(writer, None)
            self._serving.discard(task)
            writer.transport.abort()

    async def _shake_hands(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        mine = secrets.token_bytes(NONCE_BYTES)
        writer.write(GREETING_HEADER.pack(MAGIC, mine, len(self._introduction)) + self._introduction)
        answer = await reader.readexactly(NONCE_BYTES + DIGEST_BYTES)
        nonces, proof = mine + answer[:NONCE_BYTES], answer[NONCE_BYTES:]
        here = endpoint(writer.get_extra_info("sockname"))
        if not verify(proof, self._secret, b"client", nonces, self._introduction, here):
            raise ProtocolError("it does not know this job's secret")
        if writer not in self._unproven:
            raise ConnectionResetError("it was closed to make room")
        del self._unproven[writer]  # at once: a rank that has the server's proof is not made to leave
        writer.write(digest(self._secret, b"server", nonces, self._introduction, here))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer requests in turn until the client hangs up."""
        while True:
            try:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                payload = await reader.readexactly(length)
            except asyncio.IncompleteReadError:
                return
            writer.write(frame(await self._contents.answer(unpack(payload))))
            await writer.drain()

    def _tell_of_stranger(self, peer: tuple[Any, ...], error: BaseException) -> None:
        host = str(peer[0])
        if host in self._strangers or len(self._strangers) > _UNPROVEN:
            return
        self._strangers.add(host)
        reason = str(error) if isinstance(error, ProtocolError) else "it did not answer the handshake"
        sentence = f"a connection from {host} port {peer[1]} was refused: {reason}"
        self.refused.append(f"{sentence}; further ones from this host are refused silently")
        LOG.warning("%s", self.refused[-1])


def files_needed(ranks: int) -> int:
    """The open files that the process of the server needs for a job of `ranks` ranks."""
    return 3 * ranks + _UNPROVEN + _ACCEPTED_AT_ONCE + _SPARE_FILES


def allow_open_files(count: int) -> None:
    """Raise the soft limit of open files to `count`, as far as the hard limit goes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
