"""A time limit for calls that have none of their own: a rank in which one does not return says where it stands, and all end."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hpctrain.base.errors import EXIT_ENVIRONMENT
from hpctrain.contracts.identity import Identity
from hpctrain.ranks.failure import end_now
from hpctrain.ranks.launcher_channel import LauncherChannel
from hpctrain.ranks.prints import tell

START_SECONDS = 900.0
"""The limit of MPI_Init, which waits for all ranks. From a slow file system some start minutes after others."""


@contextmanager
def limited(stage: str, seconds: float, channel: LauncherChannel, identity: Identity | None = None) -> Iterator[None]:
    """End this rank, and with it the job, if the body takes longer. identity: None before it is known."""

    def end() -> None:
        who = f"a rank on {socket.gethostname()}" if identity is None else f"rank {identity.rank} on {identity.node}"
        advice = "look at this node, and at what other ranks say; those that say nothing may not have started"
        text = f"hpctrain: {who} did not finish {stage} within {seconds:g} s; {advice}"
        tell(text)
        channel.report_exit(EXIT_ENVIRONMENT)
        if identity is None:
            os._exit(EXIT_ENVIRONMENT)
        end_now(identity, EXIT_ENVIRONMENT, False)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
