"""The keys and values of the guarded store, and its requests. Runs on the server's event loop."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable, Sequence

OK, LATE, WRONG = b"ok", b"late", b"wrong"
NUMBER = struct.Struct(">q")
SECONDS = struct.Struct(">d")

Reply = list[bytes]


class Contents:
    """A request is a list of byte strings that begins with its name; a reply is a list that begins with OK, LATE or WRONG.

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
