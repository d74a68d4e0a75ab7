"""The store in which workers without MPI ask the starter for their ranks; hpctrain_horovod/engine/gloo_world.py is their side."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from pathlib import Path

from hpctrain.base.store.client import open_store
from hpctrain.base.store.messages import SECRET_BYTES
from hpctrain.base.store.network import listeners, reachable_addresses
from hpctrain.base.store.server import StoreServer
from hpctrain_horovod.starter.workers import Worker

_LOOPBACK = "127.0.0.1"


class WorkerStore:
    """Questions of workers, and the answers to them.

    file: has the store's addresses and secret, for a worker on this host. where: its content, for those on other hosts.
    """

    def __init__(self, directory: Path, workers: int, everywhere: bool) -> None:
        """directory: private, for the file. workers: the most at a time. everywhere: other hosts must reach the store."""
        secret = secrets.token_bytes(SECRET_BYTES)
        addresses = [_LOOPBACK, *(reachable_addresses() if everywhere else [])]
        self._server = StoreServer(secret, listeners(addresses), workers)
        self._store = open_store(self._server.addresses, lambda _: secret, 30.0, timedelta(seconds=30))
        self.where = json.dumps({"addresses": self._server.addresses, "secret": secret.hex()})
        self.file = directory / "starter"
        self.file.touch(0o600)
        self.file.write_text(self.where)
        self._updated: set[int] = set()

    def close(self) -> None:
        """End the store; workers that still live end, too."""
        self._store.close()
        self._server.close()

    def hear(self, workers: Iterable[Worker]) -> None:
        """Learn which workers ask for a rank, and which hold the training state."""
        for worker in workers:
            key = f"asks/{worker.name}"
            if worker.asked == worker.answered and self._store.check([key]):
                asked = int(self._store.get(key))
                if asked > worker.answered:
                    worker.asked, worker.asked_at = asked, time.monotonic()
            worker.holds = worker.holds or self._store.check([f"holds/{worker.name}"])

    def answer(self, worker: Worker, place: Mapping[str, object]) -> None:
        """Tell a worker that asks for a rank its place."""
        self._store.set(f"rank/{worker.name}/{worker.asked}", json.dumps(place))
        worker.answered = worker.asked

    def dismiss(self, worker: Worker) -> None:
        """Tell a worker that asks for a rank to leave."""
        worker.dropped = True
        self.answer(worker, {"leave": True})

    def say_update(self, generation: int) -> None:
        """Let the workers of a generation notice, at their next commit, that others wait or some have lost their slots."""
        if generation not in self._updated:
            self._updated.add(generation)
            self._store.set(f"update/{generation}", "")
