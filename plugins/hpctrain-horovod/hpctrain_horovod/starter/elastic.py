"""Starts Horovod workers without MPI, replaces those that are lost, and gives the ranks out.

The workers meet in this process's store. A worker that calls `hvd.init` asks for a rank there. When every live worker has asked,
and there are enough of them, all get their places in a new generation. Those that hold the training state, then those with the
longest service, get the lowest ranks: rank 0 has the state that the others take over. Without such a worker the job ends.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.starting.hosts import Hosts
from hpctrain.toolkit.commands import EXIT_TRAINING, UsageError
from hpctrain_horovod.starter.supervised import how
from hpctrain_horovod.starter.worker_store import WorkerStore
from hpctrain_horovod.starter.workers import Worker, places, start_worker, with_slots

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
    held: bool = False
    """A worker holds the state, or has held it. A script without `hvd.elastic.run` has none."""
    stuck: list[Worker] = field(default_factory=list)

    @property
    def present(self) -> list[Worker]:
        """The workers that take part, or wait to."""
        return [worker for worker in self.workers.values() if not worker.dropped]

    def can_lead(self, workers: Iterable[Worker]) -> bool:
        """Whether one of the workers has what training has reached so far."""
        return self.generation == 0 or any(one.holds if self.held else one.since > 0 for one in workers)


class Elastic:
    """A running job, with the methods of subprocess.Popen."""

    failed_rank: int | None = None
    """None: workers come and go."""

    def __init__(
        self, command: Sequence[str], limits: Limits, discover: Callable[[], Hosts], directory: Path, ssh: Sequence[str]
    ) -> None:
        """discover: the hosts at present; may raise UsageError. directory: private, for the secret. ssh: options of ssh."""
        self._command, self._limits, self._discover, self._ssh = list(command), limits, discover, list(ssh)
        self._hosts = discover()
        self._store = WorkerStore(directory, limits.most, everywhere=limits.replaces or not self._hosts.are_here)
        self._state = _State()
        self._resting: dict[str, float] = {}
        self._code: int | None = None
        self._discovered = time.monotonic()
        self._not_discovered = ""

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

    def _look(self) -> None:
        self._find_hosts()
        self._count_ended()
        if self._code is None:
            self._hear()
        if self._code is None:
            self._start_missing()
            self._give_ranks()
        if self._code is not None:
            self.kill()

    def _find_hosts(self) -> None:
        if time.monotonic() - self._discovered > _DISCOVER:
            self._discovered = time.monotonic()
            try:
                self._hosts, self._not_discovered = self._discover(), ""
            except UsageError as error:
                if self._not_discovered != str(error):
                    self._not_discovered = str(error)
                    self._tell(f"{error}; the hosts stay as they were")

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
                self._tell(f"worker {name} on {worker.host} ended with {how(code)}")
        if not state.workers and state.finished:
            self._code = 0 if self._limits.replaces else state.last_code
        elif state.last_code and (not self._limits.replaces or not (state.workers or state.generation)):
            self._code = state.last_code
        elif state.failures >= _MOST_FAILURES:
            self._tell(f"{state.failures} workers ended with an error of their own; the job ends")
            self._code = state.last_code

    def _hear(self) -> None:
        """Learn what the workers ask and hold; end the job when no worker that has the state is left."""
        state = self._state
        self._store.hear(state.present)
        state.held = state.held or any(worker.holds for worker in state.present)
        if not state.finished and not state.can_lead(state.present):
            self._lose_state("is left", state.last_code)

    def _lose_state(self, why: str, code: int) -> None:
        self._tell(
            f"no worker that holds the training state {why}: others would train from the beginning, so the job ends. Start it "
            "again to go on from the script's own checkpoint, if it writes one"
        )
        self._code = code or EXIT_TRAINING

    def _start_missing(self) -> None:
        state, store = self._state, self._store
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
                state.workers[name] = start_worker(name, host, self._command, store.file, store.where, self._ssh)
                state.started += 1

    def _give_ranks(self) -> None:
        state = self._state
        self._send_home()
        here = state.present
        waiting = [worker for worker in here if worker.asked > worker.answered]
        if state.finished:
            self._dismiss(waiting)
            return
        kept = with_slots(here, self._hosts, self._limits.most)
        if len(waiting) < len(here):
            if state.generation and (waiting or any(one.since and one not in kept for one in here)):
                self._store.say_update(state.generation)
            self._end_stuck(here, waiting)
            return
        enough = min(self._hosts.slots, len(here)) >= self._limits.least
        if enough and not state.can_lead(kept):
            there, slots = {one.host for one in here if one.since}, [host for host, _ in self._hosts.named]
            self._lose_state(f"has a slot ({_listed(there)} had it, slots are on {_listed(slots)})", EXIT_TRAINING)
            return
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
        stuck = self._state.stuck
        self._store.hear(stuck)
        self._dismiss(worker for worker in stuck if worker.asked > worker.answered)

    def _publish(self, kept: Sequence[Worker], dropped: Sequence[Worker]) -> None:
        generation = self._state.generation
        for worker, place in zip(kept, places(kept, generation), strict=True):
            worker.since = worker.since or generation
            self._store.answer(worker, place)
        for worker in dropped:
            if worker.since:
                self._tell(f"worker {worker.name} on {worker.host} leaves: the hosts have no slot for it")
        self._dismiss(dropped)

    def _dismiss(self, workers: Iterable[Worker]) -> None:
        """Tell workers that ask for a rank to leave: there is no slot, or nothing left to do."""
        for worker in workers:
            self._store.dismiss(worker)

    def _count_too_few(self, found: int) -> None:
        state = self._state
        if state.too_few_since is None:
            state.too_few_since = time.monotonic()
            self._tell(
                f"found slots for {found} of at least {self._limits.least} workers; waiting up to "
                f"{self._limits.start_seconds:g} s for more"
            )
        if time.monotonic() - state.too_few_since < self._limits.start_seconds:
            return
        self._tell(f"found {found} workers after {self._limits.start_seconds:g} s, expected {self._limits.least}")
        self._code = state.last_code or 1

    @staticmethod
    def _tell(sentence: str) -> None:
        print(f"horovodrun: {sentence}", file=sys.stderr, flush=True)


def _listed(hosts: Iterable[str]) -> str:
    return ", ".join(sorted(hosts))
