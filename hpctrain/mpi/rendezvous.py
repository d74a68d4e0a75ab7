"""The rendezvous mpi://, for every backend: ranks meet through MPI, without MASTER_ADDR, RANK or WORLD_SIZE.

Rank 0 opens the guarded store on a free port and sends its addresses and its secret over MPI.
"""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from typing import Any

from hpctrain.base.errors import EnvironmentUnfitError, name_ranks
from hpctrain.base.store.client import GuardedStore, open_store
from hpctrain.base.store.messages import SECRET_BYTES, ProtocolError
from hpctrain.base.store.network import LOOPBACK, bind_communication, listeners, reachable_addresses
from hpctrain.base.store.server import StoreServer
from hpctrain.mpi import leaving
from hpctrain.mpi.all_ranks import broadcast_json, gather_json
from hpctrain.mpi.library import MPI

_CONNECT = timedelta(seconds=60)  # for all addresses together


def open_over_mpi(timeout: timedelta) -> GuardedStore:
    """A new store of all ranks of MPI's world. Collective. EnvironmentUnfitError on all ranks if one cannot reach the store."""
    comm = MPI.COMM_WORLD
    leaving.install()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    one_node = node.size == comm.size
    node.Free()
    server: StoreServer | None = None
    where: Any = None
    if comm.rank == 0:
        secret = secrets.token_bytes(SECRET_BYTES)
        server = StoreServer(secret, listeners([LOOPBACK] if one_node else reachable_addresses()), comm.size)
        where = {"host": socket.gethostname(), "addresses": server.addresses, "secret": secret.hex()}
    where = broadcast_json(comm, where)
    store = _connect(where, timeout)
    used = gather_json(comm, [socket.gethostname(), None if store is None else store.address])
    failures = {rank: host for rank, (host, address) in enumerate(used) if address is None}
    if store is None or failures:  # all ranks fail together: a rank that went on alone would wait for the others
        addresses = ", ".join(f"{host} port {port}" for host, port in where["addresses"])
        raise EnvironmentUnfitError(
            f"{name_ranks(list(failures))} ({', '.join(sorted(set(failures.values())))}) could not connect to rank 0 "
            f"on {where['host']} at any of its addresses: {addresses}; expected TCP connections between the nodes of a "
            "job to be allowed: check the firewall and the network interfaces"
        )
    if server is not None:
        store.serve(server, {address[0] for _, address in used[1:]})
    bind_communication(store.local_host)
    return store


def _connect(where: dict[str, Any], timeout: timedelta) -> GuardedStore | None:
    """The store at the first address that answers this rank."""
    secret, addresses = bytes.fromhex(where["secret"]), [(host, port) for host, port in where["addresses"]]
    try:
        seconds = min(timeout, _CONNECT).total_seconds()
        return open_store(addresses, lambda _: secret, seconds, timeout)
    except (OSError, ProtocolError):
        return None
