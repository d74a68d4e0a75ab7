"""The connection of this process to a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from io import StringIO
from pathlib import Path
from tempfile import gettempdir

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
    _refuse_silent(_known(address))
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


def _known(address: str) -> str:
    """The address that "auto" stands for, if it is known: that of the last cluster on this node may still be written down."""
    if address != "auto":
        return address
    if os.environ.get("RAY_ADDRESS"):
        return os.environ["RAY_ADDRESS"]
    with suppress(OSError):
        return Path(os.environ.get("RAY_TMPDIR") or gettempdir(), "ray", "ray_current_cluster").read_text().strip()
    return address


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
