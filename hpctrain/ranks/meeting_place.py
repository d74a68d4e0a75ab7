"""The meeting place of ranks without MPI: rank 0 opens the guarded store on its host, at a port that every rank computes alike."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.launcher_variables import STARTER_VARIABLE, step_host, step_token, torchrun_token
from hpctrain.base.store.client import GuardedStore, missing_keys, open_store
from hpctrain.base.store.credentials import find_secret, make_credential
from hpctrain.base.store.messages import ProtocolError
from hpctrain.base.store.network import LOOPBACK, bind_communication, hosts_of, listeners, own_addresses
from hpctrain.base.store.server import StoreServer
from hpctrain.contracts.identity import Identity

_PORTS = range(20000, 32000)  # below the range that Linux uses for outgoing connections
_CANDIDATES = 64  # ports to try: other jobs on the node, or an attacker who wants to block this job, may hold some


@dataclass(frozen=True)
class MeetingPlace:
    """token: a name for this start of the job. host: rank 0's host, by the name that the others know. secret_file: the file
    with the secret; None if MUNGE or the home directory carries it."""

    token: str
    host: str
    one_node: bool
    secret_file: Path | None = None

    def ports(self) -> list[int]:
        """Ports in the order of trying, the same for all ranks of this start."""
        return random.Random(self.token).sample(_PORTS, _CANDIDATES)


def meeting_place(identity: Identity, environment: Mapping[str, str] = os.environ) -> MeetingPlace:
    """The meeting place of this process's job."""
    one_node = identity.local_size == identity.size
    if identity.source == "starter":
        directory = Path(environment[STARTER_VARIABLE])
        host = LOOPBACK if one_node else environment["MASTER_ADDR"]
        return MeetingPlace(directory.stem, host, one_node, directory / "secret")
    if identity.source == "slurm":
        return MeetingPlace(step_token(environment), step_host(environment), one_node)
    # two nodes may each have a job of their own on "localhost"
    token = torchrun_token(environment) + (f".{socket.gethostname()}" if one_node else "")
    return MeetingPlace(token, environment["MASTER_ADDR"], one_node)


def open_or_join(place: MeetingPlace, identity: Identity, timeout: timedelta) -> GuardedStore:
    """The store of all ranks that meet at `place`; EnvironmentUnfitError if the ranks do not meet in time."""
    store = (_join if identity.rank else _open)(place, identity, timeout)
    bind_communication(store.local_host)
    return store


def _open(place: MeetingPlace, identity: Identity, timeout: timedelta) -> GuardedStore:
    hosts = [LOOPBACK] if place.one_node else own_addresses(place.host)
    for port in place.ports():
        with suppress(OSError):  # taken
            sockets = listeners(hosts, port)
            break
    else:
        ports = ", ".join(map(str, place.ports()))
        raise EnvironmentUnfitError(f"none of the ports {ports} is free on {identity.node}; end the programs on them")
    credential = make_credential(place.token, place.secret_file)
    server = StoreServer(credential.secret, sockets, identity.size, credential.introduction)
    store = open_store(server.addresses, lambda _: credential.secret, timeout.total_seconds(), timeout)
    try:
        keys = [f"came/{rank}" for rank in range(1, identity.size)]
        await_ranks(store, identity, keys, range(1, identity.size), timeout)
        store.serve(server, {host.decode() for host in store.multi_get(keys)})
    finally:
        credential.remove()
    return store


def _join(place: MeetingPlace, identity: Identity, timeout: timedelta) -> GuardedStore:
    hosts, ports = [LOOPBACK] if place.one_node else hosts_of(place.host), place.ports()
    try:
        addresses = [(host, port) for port in ports for host in hosts]
        secret = partial(find_secret, place.token, place.secret_file)
        store = open_store(addresses, secret, timeout.total_seconds(), timeout)
    except (OSError, ProtocolError) as error:
        raise EnvironmentUnfitError(
            f"rank {identity.rank} on {identity.node} found no rank 0 of this job on {place.host} within "
            f"{timeout.total_seconds():.0f} s (ports {', '.join(map(str, ports))}; the last answer: {error}); expected "
            "TCP connections between the job's nodes to be allowed, and MUNGE or a home directory that they share"
        ) from error
    store.set(f"came/{identity.rank}", store.remote_host)
    return store


def await_ranks(store: Store, identity: Identity, keys: Sequence[str], ranks: Sequence[int], limit: timedelta) -> None:
    """Wait until each of the ranks has set its key. EnvironmentUnfitError names those that have not in time."""
    try:
        absent = missing_keys(store, keys, limit)
    except RuntimeError:  # the store is gone, with rank 0
        absent = [*range(len(keys))]
    if absent:
        raise EnvironmentUnfitError(
            f"rank {identity.rank} on {identity.node} waited {limit.total_seconds():.0f} s for rank "
            f"{', '.join(str(ranks[place]) for place in absent)} of {identity.size} to join; look for that rank's own message, or "
            "for a node on which it could not start"
        )
