"""Gloo over the guarded store: a group is used only after its ranks have proved their identity over gloo itself.

A gloo rank listens for its peers and accepts the first connection that names the right small number, whoever opens it. So
once a group is connected, every pair of ranks exchanges tokens that only the two can derive from the store. A connection
that passes cannot be taken over later, except on the network path between the two ranks. If a stranger connected first,
the group is made again.

Gloo encrypts nothing by default: `[communicator] tls` turns its TLS on, which the builds of torch on PyPI lack.
"""

from __future__ import annotations

import logging
import os
import secrets
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from hpctrain.base.errors import EnvironmentUnfitError

__all__ = ["create_group"]

BACKEND = "guarded_gloo"

LOG = logging.getLogger("hpctrain")

_ATTEMPTS = 5
_CONNECT = timedelta(seconds=60)  # the limit for connecting and authenticating; all members are present by then
# how long a member that could not connect waits for the others' outcome. They may wait for it in gloo, one after the other.
_OTHERS = timedelta(seconds=70)
_EXPECTED = (
    "expected a network between all ranks, without other programs that connect to them (GLOO_SOCKET_IFNAME selects its "
    "interface)"
)
_TRANSPORT = "GLOO_DEVICE_TRANSPORT"


class _AddressBook(Store):
    """The addresses that gloo looks up while it connects, fetched with one request for all ranks.

    Gloo itself has each rank enter one address and then ask twice for every rank's. Each network takes one such round.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__()
        self._store, self._rank, self._size = store, rank, size
        self.rounds = 0
        """Networks so far."""
        self._found: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stub says str, and it is bytes
        self.rounds += 1
        self._store.set(f"address/{self.rounds}/{self._rank}", key.encode() + b"\0" + value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        if key not in self._found:
            entries = self._store.multi_get([f"address/{self.rounds}/{rank}" for rank in range(self._size)])
            for name, _, value in (entry.partition(b"\0") for entry in entries):
                self._found[name.decode()] = value
        return self._found[key]

    def forget(self) -> None:
        """Free the addresses: the group is connected, or its connection failed."""
        self._found = {}

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


_in_use: list[str] = []


def transport_in_use() -> str | None:
    """The transport of this process's gloo groups, "" for the default; None before the first group. Gloo reads its setting once."""
    return _in_use[0] if _in_use else None


# kept alive here: gloo's groups hold only the C++ half of their address book, which needs the Python half
_books: list[_AddressBook] = []


def create_group(options: Any, _: Any = None) -> dist.ProcessGroupGloo:
    """The group described by torch's `_DistributedBackendOptions`. Collective over its members.

    Raises DistStoreError if a member is missing, EnvironmentUnfitError if members can't reach each other, or strangers
    connected first in every attempt.
    """
    if not _in_use:
        _in_use.append(os.environ.get(_TRANSPORT, ""))
    rank, size = options.group_rank, options.group_size
    if size == 1:  # it connects to nobody
        return dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
    from hpctrain.base.store.client import missing_keys

    # a group that is destroyed and made again gets the same name and store from torch, with the first group's keys in it
    store = PrefixStore(str(options.store.add(f"made/{rank}", 1)), options.store)
    members = list(options.global_ranks_in_group) or list(range(size))
    store.set(f"here/{rank}", "")
    if absent := missing_keys(store, [f"here/{member}" for member in range(size)], options.timeout):
        raise dist.DistStoreError(
            f"group {options.group_id!r} was not complete within {options.timeout.total_seconds():g} s: ranks "
            f"{', '.join(str(members[one]) for one in absent)} did not create it; new_group must be called by all ranks, in the "
            "same order"
        )
    reason = ""
    for attempt in range(_ATTEMPTS):
        attempt_store = PrefixStore(f"attempt/{attempt}", store)
        found = _connect(attempt_store, rank, size)
        mine = found if isinstance(found, str) else ""
        outcomes = [f"failed/{member}" for member in range(size)]
        attempt_store.set(outcomes[rank], mine)
        if mine and (slow := missing_keys(attempt_store, outcomes, _OTHERS)):
            raise EnvironmentUnfitError(
                f"gloo: group {options.group_id!r} on rank {members[rank]}: {mine}; rank "
                f"{', '.join(str(members[one]) for one in slow)} is still connecting after {_OTHERS.total_seconds():g} s more; "
                f"{_EXPECTED}"
            )
        reason = next((one.decode() for one in attempt_store.multi_get(outcomes) if one), "")
        if not reason and not isinstance(found, str):
            found.set_timeout(options.timeout)
            return found
        if rank == 0:
            LOG.warning("gloo: group %r is connected anew: %s", options.group_id, reason)
    raise EnvironmentUnfitError(
        f"gloo: group {options.group_id!r} could not be connected in {_ATTEMPTS} attempts: {reason}; {_EXPECTED}"
    )


def _connect(store: Store, rank: int, size: int) -> dist.ProcessGroupGloo | str:
    """The connected group, or what went wrong on this rank."""
    from hpctrain.base.store.messages import DIGEST_BYTES

    if rank == 0:
        store.set("secret", secrets.token_hex(DIGEST_BYTES))
    secret = store.get("secret")
    book = _AddressBook(store, rank, size)
    _books.append(book)
    try:
        group = dist.ProcessGroupGloo(book, rank, size, _CONNECT)
        # with several networks, gloo alternates between them
        if not all(_all_prove(group, secret, rank, size) for _ in range(book.rounds)):
            return "something else took a rank's place"
    except (dist.DistStoreError, dist.DistNetworkError):
        raise
    except RuntimeError as error:
        return str(error).partition("\n")[0][:500] or type(error).__name__
    finally:
        book.forget()
    return group


def _all_prove(group: dist.ProcessGroupGloo, secret: bytes, rank: int, size: int) -> bool:
    """Whether each member sent the token that it alone can send to this rank. Gloo sends tokens directly, without relays."""
    mine = torch.frombuffer(bytearray(_tokens(secret, [(rank, to) for to in range(size)])), dtype=torch.uint8)
    received = torch.empty_like(mine)
    group.alltoall_base(received, mine, [], []).wait()  # type: ignore[attr-defined]  # torch's stub lacks it
    return bytes(received.numpy()) == _tokens(secret, [(sender, rank) for sender in range(size)])


def _tokens(secret: bytes, pairs: list[tuple[int, int]]) -> bytes:
    from hpctrain.base.store.messages import digest

    return b"".join(digest(secret, str(sender).encode(), str(receiver).encode()) for sender, receiver in pairs)


dist.Backend.register_backend(BACKEND, create_group, extended_api=True, devices=["cpu"])
