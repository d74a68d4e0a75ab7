"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path

from hpctrain.base.safe_files import is_only_ours, reading, temporary_place
from hpctrain.toolkit.commands import EnvironmentUnfitError, reason

NAMESPACE = "hpctrain"
_SECONDS = 10.0
"""Seconds for the head to answer."""


@contextmanager
def connected(address: str, shows: bool = False) -> Iterator[None]:
    """A connection to the cluster at `address`; one that this process has already is used and stays.

    shows: whether what actors print is shown here. Raises EnvironmentUnfitError if there is no cluster.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or _noted()
    _refuse_silent(address)
    try:
        with redirect_stderr(StringIO()):  # it counts its attempts there
            ray.init(address=address, namespace=NAMESPACE, logging_level=logging.ERROR, log_to_driver=shows)
    except (ConnectionError, ValueError, RuntimeError) as error:
        said = reason(error).strip().splitlines() or ["it did not answer"]
        raise _no_cluster(address, said[0]) from None
    try:
        yield
    finally:
        ray.shutdown()


def _noted() -> str:
    """The address of this user's newest cluster on this node, as Ray notes it in a directory that all users may write. Raises
    EnvironmentUnfitError unless nobody else can have noted it, and nobody else listens there: answers of a cluster are code."""
    path = Path(os.environ.get("RAY_TMPDIR") or temporary_place(), "ray", "ray_current_cluster")
    try:
        with reading(path) as fd:
            found, address = os.fstat(fd), os.read(fd, 1000).decode(errors="replace").strip()
    except OSError as error:
        raise _no_cluster("auto", reason(error)) from None
    if not is_only_ours(found):
        raise _stranger(f"{path} says {address!r}, and another user can have written it")
    if _listeners(address.rpartition(":")[2]) - {0, os.geteuid()}:
        raise _stranger(f"another user listens at {address!r}, which {path} says")
    return address


def _stranger(why: str) -> EnvironmentUnfitError:
    return EnvironmentUnfitError(
        f"[scheduler.ray] address = 'auto': {why}; expected a cluster of this user's, or its address in the job or in RAY_ADDRESS"
    )


def _listeners(port: str) -> set[int]:
    """The users that listen at a TCP port of this node."""
    users = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        with suppress(OSError):
            for _, local, _, state, *more in (line.split() for line in table.read_text().splitlines()[1:]):
                if state == "0A" and port.isdigit() and int(local.rpartition(":")[2], 16) == int(port):
                    users.add(int(more[3]))
    return users


def _refuse_silent(address: str) -> None:
    """Raises EnvironmentUnfitError where nothing listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return
    try:
        with socket.create_connection((host, int(port)), _SECONDS):
            return
    except OSError as error:
        raise _no_cluster(address, reason(error)) from None


def _no_cluster(address: str, why: str) -> EnvironmentUnfitError:
    return EnvironmentUnfitError(
        f"found no Ray cluster at {address!r} ({why}); expected one that runs: `ray start --head` on its first node, "
        "`ray start --address HOST:6379` on the others, or `python -m hpctrain_ray.cluster` in a job of Slurm"
    )
