"""The watchdog's cost: processor time of a phase, of a heartbeat, and what rank 0 spends on all ranks.

    python benchmarks/watchdog.py

Server and clients share this process, so what is measured is the sum of both sides.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta

import torch.distributed as dist

from hpctrain.base.store.client import open_store
from hpctrain.base.store.messages import SECRET_BYTES
from hpctrain.base.store.network import LOOPBACK, listeners
from hpctrain.base.store.server import StoreServer
from hpctrain.ranks.watchdog.position import Position
from hpctrain.ranks.watchdog.watcher import interval_of

ROUNDS = 2000
LIMIT = 600.0  # seconds: the default limit of a phase


def phase_seconds() -> float:
    """Entering and leaving a phase."""
    position = Position()
    begin = time.process_time()
    for step in range(100_000):
        with position.inside("forward", step):
            pass
    return (time.process_time() - begin) / 100_000


def round_seconds() -> float:
    """A heartbeat, and a wait for an order that does not come."""
    secret = secrets.token_bytes(SECRET_BYTES)
    server = StoreServer(secret, listeners([LOOPBACK]), 2)
    store = open_store(server.addresses, lambda _: secret, 10.0, timedelta(seconds=10))
    begin = time.process_time()
    for number in range(ROUNDS):
        store.set("beat/1", f'["forward", {number}, 0.123, {number}]')
        try:
            store.wait(["order/1"], timedelta(milliseconds=1))
        except dist.DistStoreError:
            continue
    seconds = (time.process_time() - begin) / ROUNDS
    store.close()
    server.close()
    return seconds


def main() -> None:
    phase, one = phase_seconds(), round_seconds()
    print(f"a phase {phase * 1e6:.2f} us, a heartbeat with its wait {one * 1e6:.0f} us on both sides together")
    for ranks in (2, 16, 128, 1024, 8192):
        interval = interval_of(LIMIT, ranks)
        print(f"{ranks:5} ranks: one every {interval:5.1f} s, {ranks * one / interval:.2%} of a core on rank 0 at most")


if __name__ == "__main__":
    main()
