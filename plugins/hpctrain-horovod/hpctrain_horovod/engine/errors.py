"""Horovod's exceptions. Imports nothing of hpctrain."""

from __future__ import annotations


class HorovodInternalError(RuntimeError):
    """An operation failed on this rank or on another. With `hvd.elastic.run`, training goes back to the last commit."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Hosts were added or removed; training goes on from the current state.

    skip_sync: the state is the same on all workers and need not be synchronized.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync
