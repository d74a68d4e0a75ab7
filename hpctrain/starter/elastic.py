"""Starts Horovod workers without MPI, replaces those that are lost, and gives the ranks out.

The workers meet in this process's store. A worker that calls `hvd.init` asks for a rank there. When every live worker has asked,
and there are enough of them, all get their places in a new generation. Those with the longest service get the lowest ranks:
rank 0 has the state that the others take over.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from hpctrain.starter.hosts import Hosts
from hpctrain.starter.workers import Worker, start_worker
from hpctrain.store.client import open_store
from hpctrain.store.messages import SECRET_BYTES
from hpctrain.store.network import LOOPBACK, listeners, reachable_addresses
from hpctrain.store.server import StoreServer

_POLL = 0.1  # seconds between two looks
_DISCOVER = 1.0  # seconds between two looks for hosts
_REST = 10.0  # seconds before another worker is started on a host that ssh has lost
_MOST_FAILURES = 3
"""Workers that may end with an error of their own; a worker that was killed does not count."""


@dataclass(frozen=True)
class Limits:
    """Numbers of workers. replaces: whether lost workers are replaced. resets: the most new generations, None for any number.
    start_seconds: for `least` workers to come. return_seconds: for the others to ask for a rank again, once one has."""

    least: int
    most: int
    replaces: bool
    resets: int | None = None
    start_seconds: float = 600.0
    return_seconds: float = 600.0


@dataclass
class _State:
    workers: dict[str, Worker] = field(default_factory=dict)
    generation: int = 0
    started: int = 0
    failures: int = 0
    last_code: int = 0
    finished: bool = False
    too_few_since: float | None = None
    updates: int = 0
    stuck: list[Worker] = field(default_factory=list)


class Elastic:
    """A running job, with the methods of subprocess.Popen."""

    failed_rank: int | None = None
    """None: workers come and go."""

    def __init__(
        self, command: Sequence[str], limits: Limits, discover: Callable[[], Hosts], directory: Path, ssh: Sequence[str]
    ) -> None:
        """discover: the hosts at present. directory: private, for the secret. ssh: options of ssh."""
        self._command, self._limits, self._discover, self._directory = list(command), limits, discover, directory
        self._ssh = list(ssh)
        self._hosts = discover()
        secret = secrets.token_bytes(SECRET_BYTES)
        where = [LOOPBACK] if self._hosts.are_here and limits.replaces is False else [LOOPBACK, *reachable_addresses()]
        self._server = StoreServer(secret, listeners(where), limits.most)
        self._store = open_store(self._server.addresses, lambda _: secret, 30.0, timedelta(seconds=30))
        self._where = json.dumps({"addresses": self._server.addresses, "secret": secret.hex()})
        file = directory / "starter"
        file.touch(0o600)
        file.write_text(self._where)
        self._file = file
        self._state = _State()
        self._resting: dict[str, float] = {}
        self._code: int | None = None
        self._discovered = time.monotonic()

    def poll(self) -> int | None:
        """The exit code, once the job has ended."""
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Look after the workers until the job ends. Raises TimeoutExpired."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            self._look()
            if self._code is None:
                if give_up is not None and time.monotonic() > give_up:
                    raise subprocess.TimeoutExpired("workers", timeout or 0)
                time.sleep(_POLL)
        return self._code

    def kill(self) -> None:
        """End all workers."""
        for worker in self._state.workers.values():
            worker.kill()
        self._store.close()
        self._server.close()

    def _look(self) -> None:
        self._find_hosts()
        self._count_ended()
        if self._code is None:
            self._start_missing()
            self._give_ranks()
        if self._code is not None:
            self.kill()

    def _find_hosts(self) -> None:
        if time.monotonic() - self._discovered > _DISCOVER:
            self._discovered = time.monotonic()
            self._hosts = self._discover()

    def _count_ended(self) -> None:
        state = self._state
        for name, worker in list(state.workers.items()):
            code = worker.process.poll()
            if code is None:
                continue
            del state.workers[name]
            if code == 0:
                state.finished = state.finished or not worker.dropped
            elif not worker.dropped:
                state.last_code = code if code > 0 else 128 - code
                if worker.has_lost_host(code):
                    self._resting[worker.host] = time.monotonic() + _REST
                elif code > 0:
                    state.failures += 1
                self._tell(f"worker {name} ended with {_status(code)}")
        over = not state.workers and (state.finished or state.last_code)
        if over:
            recovered = state.finished and (self._limits.replaces or not state.last_code)
            self._code = 0 if recovered else state.last_code
        elif state.last_code and not self._limits.replaces:
            self._code = state.last_code
        elif state.failures >= _MOST_FAILURES:
            self._tell(f"{state.failures} workers ended with an error of their own; the job ends")
            self._code = state.last_code

    def _start_missing(self) -> None:
        state = self._state
        if state.finished or (state.started and not self._limits.replaces):
            return
        for host, slots in self._hosts.named:
            here = [worker for worker in state.workers.values() if worker.host == host]
            if time.monotonic() < self._resting.get(host, 0):
                continue
            for _ in range(slots - len(here)):
                if len(state.workers) >= self._limits.most:
                    return
                name = str(state.started)
                state.workers[name] = start_worker(name, host, self._command, self._file, self._where, self._ssh)
                state.started += 1

    def _give_ranks(self) -> None:
        state, store = self._state, self._store
        self._send_home()
        here = [worker for worker in state.workers.values() if not worker.dropped]
        for worker in here:
            if worker.asked == worker.answered and store.check([f"asks/{worker.name}"]):
                worker.asked = int(store.get(f"asks/{worker.name}"))
                worker.asked_at = time.monotonic()
        waiting = [worker for worker in here if worker.asked > worker.answered]
        if state.finished:
            self._dismiss(waiting)
            return
        if len(waiting) < len(here):
            if waiting and state.generation:
                self._say_update(len(waiting))
            self._end_stuck(here, waiting)
            return
        kept = self._kept(waiting)
        if len(kept) < self._limits.least:
            self._count_too_few(len(kept))
            return
        state.too_few_since = None
        if self._limits.resets is not None and state.generation > self._limits.resets:
            self._tell(f"the job was formed anew {self._limits.resets} times, its --reset-limit")
            self._code = state.last_code or 1
            return
        state.generation += 1
        self._publish(kept, [worker for worker in waiting if worker not in kept])

    def _end_stuck(self, here: Sequence[Worker], waiting: Sequence[Worker]) -> None:
        """End the workers that do not ask again, long after another one did. New ones may have to wait for a commit."""
        now = time.monotonic()
        began = min((worker.asked_at for worker in waiting if worker.since), default=now)
        for worker in here:
            if worker not in waiting and now - max(began, worker.started_at) >= self._limits.return_seconds:
                self._tell(
                    f"worker {worker.name} on {worker.host} did not come back to hvd.init within "
                    f"{self._limits.return_seconds:g} s (HOROVOD_ELASTIC_TIMEOUT), and is ended"
                )
                worker.kill()
                self._state.stuck.append(worker)

    def _send_home(self) -> None:
        """Workers on other hosts that were ended but live: only their ssh has gone."""
        for worker in self._state.stuck:
            key = f"asks/{worker.name}"
            if self._store.check([key]) and int(self._store.get(key)) > worker.answered:
                worker.asked = int(self._store.get(key))
                self._answer(worker, {"leave": True})

    def _kept(self, waiting: Sequence[Worker]) -> list[Worker]:
        """The workers that have a slot, those with the longest service first."""
        slots = dict(self._hosts.named)
        kept: list[Worker] = []
        for worker in sorted(waiting, key=lambda one: (one.since or sys.maxsize, int(one.name))):
            if slots.get(worker.host, 0) > 0 and len(kept) < self._limits.most:
                slots[worker.host] -= 1
                kept.append(worker)
        return kept

    def _publish(self, kept: Sequence[Worker], dropped: Sequence[Worker]) -> None:
        generation = self._state.generation
        hosts = {host: [worker for worker in kept if worker.host == host] for host in {one.host for one in kept}}
        for rank, worker in enumerate(kept):
            here = hosts[worker.host]
            local = here.index(worker)
            across = [host for host, ones in sorted(hosts.items()) if len(ones) > local]
            place = {
                "generation": generation, "rank": rank, "size": len(kept), "local_rank": local, "local_size": len(here),
                "cross_rank": across.index(worker.host), "cross_size": len(across),
                "homogeneous": len({len(ones) for ones in hosts.values()}) == 1,
            }  # fmt: skip
            worker.since = worker.since or generation
            self._answer(worker, place)
        self._dismiss(dropped)

    def _dismiss(self, workers: Iterable[Worker]) -> None:
        """Tell workers that ask for a rank to leave: there is no slot, or nothing left to do."""
        for worker in workers:
            worker.dropped = True
            self._answer(worker, {"leave": True})

    def _answer(self, worker: Worker, place: Mapping[str, object]) -> None:
        self._store.set(f"rank/{worker.name}/{worker.asked}", json.dumps(place))
        worker.answered = worker.asked

    def _say_update(self, waiting: int) -> None:
        """New workers wait: the others notice at their next commit."""
        if self._state.updates != self._state.generation:
            self._state.updates = self._state.generation
            self._store.set(f"update/{self._state.generation}", str(waiting))

    def _count_too_few(self, found: int) -> None:
        state = self._state
        if state.too_few_since is None:
            state.too_few_since = time.monotonic()
        if time.monotonic() - state.too_few_since < self._limits.start_seconds:
            return
        self._tell(f"found {found} workers after {self._limits.start_seconds:g} s, expected {self._limits.least}")
        self._code = state.last_code or 1

    @staticmethod
    def _tell(sentence: str) -> None:
        print(f"horovodrun: {sentence}", file=sys.stderr, flush=True)


def _status(code: int) -> str:
    return f"exit code {code}" if code > 0 else f"signal {-code}"
