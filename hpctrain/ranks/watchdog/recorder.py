"""Operations that have not ended, as torch's flight recorder and NCCL's own report (RAS) tell of them."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from hpctrain.base.torch_private import recorded_operations

LOG = logging.getLogger("hpctrain")

_RAS = "localhost:28028"
"""The address at which NCCL listens from 2.24 on, unless NCCL_RAS_ADDR names another."""
_ANSWERING = 10.0
"""Seconds for NCCL to ask all ranks, of which some may not answer."""


def unfinished() -> list[str]:
    """The operations of this process that torch has recorded and that have not ended, oldest first."""
    try:
        return [_told(one) for one in recorded_operations() if not one["retired"]]
    except Exception:  # another torch's: the watchdog's report must come without it
        LOG.info("torch's flight recorder can't be read", exc_info=True)
        return []


def _told(entry: dict[str, Any]) -> str:
    name, described = entry["process_group"]
    kind = "p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"
    tensors = [
        f"{tuple(shape)} {dtype}" for shape, dtype in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    ]
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    tensor = f", {tensors[0]}{more}" if tensors else ""
    return f"{entry['profiling_name']} number {entry[kind]} of {described or name}{tensor}, {entry['state']}"


def nccl_report() -> str | None:
    """NCCL's view of all ranks; None where no NCCL of this node answers."""
    host, _, port = os.environ.get("NCCL_RAS_ADDR", _RAS).rpartition(":")
    try:
        with closing(socket.create_connection((host, int(port)), timeout=_ANSWERING)) as connection:
            connection.sendall(b"VERBOSE STATUS\n")
            return b"".join(_received(connection)).decode(errors="replace")
    except (OSError, ValueError) as error:
        LOG.debug("NCCL's report: %s", error)
        return None


def _received(connection: socket.socket) -> Iterator[bytes]:
    while content := connection.recv(65536):
        yield content
