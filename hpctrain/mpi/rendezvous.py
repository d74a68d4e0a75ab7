"""mpi://: the ranks find each other through MPI, so nobody sets MASTER_ADDR, RANK or WORLD_SIZE. Serves every backend.

Rank 0 opens the store on a free port and tells the others over MPI where it may be reached.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from urllib.parse import parse_qsl, urlparse

import psutil  # type: ignore[import-untyped]
from torch._C._distributed_c10d import Store, TCPStore

from hpctrain.errors import EnvironmentUnfitError
from hpctrain.mpi import leaving
from hpctrain.mpi.errors import name_ranks
from hpctrain.mpi.library import MPI

_ATTEMPT = 2.0  # seconds for one address: a firewall may swallow packets instead of refusing them
_CONNECT = timedelta(seconds=60)  # for all addresses together


def rendezvous(url: str, timeout: timedelta = timedelta(minutes=30)) -> Iterator[tuple[Store, int, int]]:
    """The handler that torch.distributed calls for mpi://. Yields the store, the rank and the world size. Collective.

    Raises EnvironmentUnfitError on all ranks when one cannot reach the store, ValueError when the rank or world size
    that init_process_group was given is not MPI's.
    """
    comm = MPI.COMM_WORLD
    _check_given(url, comm)
    leaving.install()
    yield _connect(comm, timeout), comm.rank, comm.size
    raise RuntimeError("mpi:// cannot meet a second time; call init_process_group again")


def _check_given(url: str, comm: MPI.Intracomm) -> None:
    given = dict(parse_qsl(urlparse(url).query))
    for name, actual in (("rank", comm.rank), ("world_size", comm.size)):
        if int(given.get(name, actual)) != actual:
            raise ValueError(f"found {name}={given[name]}, but MPI says {actual}; leave it out with mpi://")


def _connect(comm: MPI.Intracomm, timeout: timedelta) -> Store:
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    one_node = node.size == comm.size
    node.Free()
    store: TCPStore | None = None
    where: tuple[str, int, list[str]] | None = None
    if comm.rank == 0:
        store = TCPStore("localhost", 0, comm.size, is_master=True, wait_for_workers=False, timeout=timeout)
        where = (socket.gethostname(), store.port, ["127.0.0.1"] if one_node else reachable_addresses())
    host, port, addresses = comm.bcast(where)
    failure = None
    if store is None:
        address = first_answering(addresses, port, min(timeout, _CONNECT).total_seconds())
        if address is None:
            failure = socket.gethostname()
        else:
            store = TCPStore(address, port, comm.size, is_master=False, timeout=timeout)
    # All ranks fail together: one that went on alone would wait for the others.
    failures = {rank: name for rank, name in enumerate(comm.allgather(failure)) if name is not None}
    if failures or store is None:
        raise EnvironmentUnfitError(
            f"{name_ranks(list(failures))} ({', '.join(sorted(set(failures.values())))}) could not connect to rank 0 "
            f"on {host}, port {port}, at any of its addresses: {', '.join(addresses)}; expected TCP connections "
            "between the nodes of a job to be allowed: check the firewall and the network interfaces"
        )
    return store


def reachable_addresses() -> list[str]:
    """This host's addresses that another host may reach it at, those of its name first."""
    named = []
    with suppress(socket.gaierror):  # a node whose name does not resolve still has interfaces
        named = [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    interfaces = [
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]
    usable = [a for a in named if a in interfaces] + sorted(interfaces, key=lambda a: ":" in a)
    return [a for a in dict.fromkeys(usable) if not ipaddress.ip_address(a).is_loopback]


def first_answering(addresses: Sequence[str], port: int, seconds: float) -> str | None:
    """The first address that accepts a connection, tried in turn, again and again for `seconds`; None if none does."""
    give_up = time.monotonic() + seconds
    while True:
        for address in addresses:
            try:
                with socket.create_connection((address, port), timeout=_ATTEMPT):
                    return address
            except OSError:
                continue
        if time.monotonic() > give_up:
            return None
        time.sleep(0.1)
