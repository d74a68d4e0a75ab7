"""Ranks that srun started without MPI meet through Slurm's variables: the first node, and a port made of the job's number."""

from __future__ import annotations

import os
import re
import socket
import time
import zlib
from collections.abc import Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore

from hpctrain.errors import EnvironmentUnfitError
from hpctrain.world.identity import Identity

_PORTS = range(20000, 32000)
"""Below the range that Linux hands to outgoing connections."""
_CANDIDATES = 16
"""Ports to try: one may be taken by another job on the node."""


def first_host(nodelist: str) -> str:
    """ "node[03-07,9],other1" -> "node03"; the first task runs there."""
    first = re.split(r",(?![^\[]*\])", nodelist)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)


def candidate_ports(step: str) -> list[int]:
    """Ports that every task of `step` ("JOB.STEP") works out alike."""
    return [_PORTS[zlib.crc32(f"{step} {attempt}".encode()) % len(_PORTS)] for attempt in range(_CANDIDATES)]


def meet(identity: Identity, timeout: timedelta, environment: Mapping[str, str] = os.environ) -> Store:
    """The store that all tasks of this step share; EnvironmentUnfitError when that does not work in time."""
    step = f"{environment.get('SLURM_JOB_ID', '0')}.{environment.get('SLURM_STEP_ID', '0')}"
    # a requeued job has the same number: what is left of its first try must not answer
    token = f"{step}.{environment.get('SLURM_RESTART_COUNT', '0')}"
    host = first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_NODELIST", "localhost")))
    ports = candidate_ports(step)
    if identity.rank == 0:
        return _open(ports, identity, token, timeout)
    give_up = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < give_up:
        for port in ports:
            store = _try(host, port, identity, token, timeout)
            if store is not None:
                return store
        time.sleep(0.2)
    raise EnvironmentUnfitError(
        f"rank {identity.rank} on {identity.node} found no rank 0 on {host} within {timeout.total_seconds():.0f} s "
        f"(ports {', '.join(map(str, ports))}); expected TCP connections between the job's nodes to be allowed"
    )


def _open(ports: list[int], identity: Identity, token: str, timeout: timedelta) -> Store:
    for port in ports:
        try:
            store = TCPStore(
                "0.0.0.0", port, identity.size, is_master=True, wait_for_workers=False, timeout=timeout, use_libuv=True
            )
        except RuntimeError:
            continue  # taken
        store.set("token", token)
        return store
    raise EnvironmentUnfitError(f"none of the ports {', '.join(map(str, ports))} is free on {identity.node}")


def _try(host: str, port: int, identity: Identity, token: str, timeout: timedelta) -> Store | None:
    """The store behind `port`, if it is this step's."""
    try:
        with socket.create_connection((host, port), timeout=2):
            pass
        store = TCPStore(host, port, identity.size, is_master=False, timeout=timedelta(seconds=5))
        if store.get("token").decode() != token:
            return None
    except (OSError, RuntimeError):
        return None
    store.set_timeout(timeout)
    return store
