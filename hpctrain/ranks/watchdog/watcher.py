"""Every rank's thread of the watchdog: it sends heartbeats, answers rank 0's questions, and ends the process when rank 0 says so.

It talks over connections of its own to the guarded store, so it works while the ranks wait in a collective. They are in Python:
Python ends a thread that still waits when the program ends, and in C++, such as torch's stores, this would abort the process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hpctrain.base.errors import EXIT_TRAINING
from hpctrain.ranks.meeting import World
from hpctrain.ranks.prints import tell
from hpctrain.ranks.process import end_now
from hpctrain.ranks.watchdog.position import END, Position
from hpctrain.ranks.watchdog.stacks import all_stacks, unfinished
from hpctrain.ranks.watchdog.status import beat_of, status_of

LOG = logging.getLogger("hpctrain")

# the interval of a rank's heartbeats: at least so many seconds, at most this share of the limit, so many ranks served a second
_SHORTEST, _LONGEST_SHARE, _RANKS_PER_SECOND = 0.1, 10, 25
_PATIENCE = 5.0  # seconds for an answer of the store: rank 0 may hold the interpreter lock
_LEAVING = 10  # seconds for this process to end, by Abort under MPI, before the system ends it
_FINISHING = 10.0  # seconds after the end of rank 0's store within which this rank may reach the end of its training
_LOGGING = 2.0  # seconds for writing into the log
_SUSPENDED = 15.0  # seconds by which a wait ends too late, or half of the limit if that is more, of a suspended process
_DIAGNOSING = 10.0  # seconds for rank 0 to find out who is missing
IGNORED = "alarm/ignored"
"""The key with which rank 0 answers an alarm that it does not look into."""


def interval_of(limit: float, ranks: int) -> float:
    """Seconds between two heartbeats of a rank."""
    return max(_SHORTEST, min(limit / _LONGEST_SHARE, 2.0 + ranks / _RANKS_PER_SECOND))


class Watcher:
    """The thread. Rank 0 has a Monitor in its place."""

    def __init__(self, world: World, position: Position, limit: float) -> None:
        """limit: seconds that a phase, or a rank without a heartbeat, may take."""
        self.identity, self.position, self.limit = world.identity, position, limit
        self.interval = interval_of(limit, world.identity.size)
        self._connections = None if world.guarded is None else world.guarded.another(_PATIENCE)
        self.store: Store = self._connections or world.store
        self.closing = threading.Event()
        self._world, self._orders = world, 0
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Training is over on this rank. The thread ends by itself, at the latest after an interval."""
        self.closing.set()

    def alarm(self, reason: str) -> None:
        """Ask rank 0 for a diagnosis now, because a communication of this rank has failed.

        Returns if another rank reports the cause, or if rank 0 does not answer in time; else the process ends.
        """
        self.store.set("alarm", json.dumps({"rank": self.identity.rank, "reason": reason}))
        self.comes(IGNORED, 2 * self.interval + _DIAGNOSING)

    def wake(self) -> None:
        """This process was suspended, by the system or the scheduler: nothing was overdue meanwhile."""
        self.position.touch()

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            if self._connections is not None:
                self._connections.close()

    def _watch(self) -> None:
        heard = time.monotonic()
        while not self.closing.is_set():
            try:
                self.turn()
                heard = time.monotonic()
            except dist.DistNetworkError as error:
                lost = not isinstance(error.__cause__, TimeoutError)
                if self.position.phase == END:  # rank 0 has ended in order
                    return
                if self.closing.wait(_FINISHING if lost else 0.1):
                    return
                if lost or time.monotonic() - heard > self.limit:
                    self._leave_without_store(error)
            except Exception:  # a defect here must not make this rank look silent
                LOG.info("the watchdog failed", exc_info=True)
                self.closing.wait(self.interval)

    def turn(self) -> None:
        """Send a heartbeat, and take the next order if there is one. Raises DistNetworkError if rank 0 does not answer."""
        self.store.set(f"beat/{self.identity.rank}", json.dumps(beat_of(self.position)))
        key = f"order/{self._orders + 1}"
        if self.comes(key, self.interval):
            self._orders += 1
            self._obey(json.loads(self.store.get(key)))

    def comes(self, key: str, seconds: float) -> bool:
        """Whether the key is set within so many seconds; never for a rank alone."""
        begin = time.monotonic()
        try:
            if self._connections is None:
                self.closing.wait(seconds)
                return False
            self.store.wait([key], timedelta(seconds=seconds))
            return True
        except dist.DistStoreError:
            return False
        finally:
            if time.monotonic() - begin > seconds + max(_SUSPENDED, self.limit / 2):
                self.wake()

    def _obey(self, order: Mapping[str, Any]) -> None:
        """Tell where this rank is, or end."""
        if "number" in order:
            self.store.set(
                f"status/{order['number']}/{self.identity.rank}", json.dumps(status_of(self.identity, self.position))
            )
            if order["stacks"]:
                aside(log_stacks)
        else:
            self.store.set(f"ending/{self.identity.rank}", "")
            self.end(order["code"])

    def end(self, code: int) -> NoReturn:
        """End this process, whatever its main thread waits for."""
        # Abort may wait for a lock that the main thread holds. Nobody but the system can end the process then.
        signal.alarm(_LEAVING)
        aside(partial(LOG.info, "the watchdog ends this rank with %d", code))
        for worker in multiprocessing.active_children():
            worker.kill()
        self._world.channel.report_exit(code)
        end_now(self.identity, code, everybody=False)

    def _leave_without_store(self, error: Exception) -> NoReturn:
        status = status_of(self.identity, self.position)
        aside(log_stacks)
        if self.identity.local_rank == 0 or self.identity.rank == 1:  # one line of each node
            tell(
                f"hpctrain: watchdog: rank 0 has ended, or its node is out of reach ({error}); rank {status.rank} on {status.node} "
                f"was in {status.beat.where}, at {status.line}"
            )
        self.end(EXIT_TRAINING)


def end_waiting_ranks(world: World, code: int) -> None:
    """End, with `code`, the ranks that have not noticed this failure: a wait in NCCL lasts until its own limit."""
    store = world.guarded
    assert store is not None  # there are several ranks
    with contextlib.suppress(RuntimeError):  # rank 0 has ended
        if world.identity.rank == 0:  # its Monitor, which gives the orders else, has ended
            keys = (f"order/{number}" for number in itertools.count(1))
            store.set(next(key for key in keys if not store.check([key])), json.dumps({"code": code}))
        else:
            store.set("alarm", json.dumps({"code": code}))


def aside(work: Callable[[], None]) -> None:
    """Do `work` that may block, on a thread of its own: a hung file system must not stop the watchdog."""
    thread = threading.Thread(target=work, name="watchdog's log", daemon=True)
    thread.start()
    thread.join(_LOGGING)


def log_stacks() -> None:
    """Write all Python stacks into this rank's log, and the operations that have not ended."""
    LOG.info("the watchdog asks for all stacks\n%s", all_stacks())
    operations = unfinished()
    LOG.info("operations that have not ended: %d%s", len(operations), "".join(f"\n{one}" for one in operations))
