"""Every rank's thread of the watchdog: it sends heartbeats, answers rank 0's questions, and ends the process when rank 0 says so.

It talks over a store connection of its own, so it works while the ranks wait in a collective.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn

import torch.distributed as dist

from hpctrain.base.devices import is_started
from hpctrain.base.errors import EXIT_TRAINING
from hpctrain.ranks.meeting import World
from hpctrain.ranks.prints import tell
from hpctrain.ranks.process import end_now
from hpctrain.ranks.watchdog.channel import open_channel
from hpctrain.ranks.watchdog.position import END, Position
from hpctrain.ranks.watchdog.recorder import nccl_report, unfinished
from hpctrain.ranks.watchdog.stacks import all_stacks
from hpctrain.ranks.watchdog.status import RankStatus, beat_of, status_of
from hpctrain.ranks.watchdog.workers import worker_stacks

LOG = logging.getLogger("hpctrain")

_SHORTEST, _LONGEST_SHARE, _RANKS_PER_SECOND = 0.1, 10, 25
"""Limits of the interval of a rank's heartbeats: at least so many seconds, at most this share of the limit, so many ranks
served a second."""
_LEAVING = 10
"""Seconds for this process to end, by Abort under MPI, before the system ends it."""
_FINISHING = 10.0
"""Seconds after the end of rank 0's store within which this rank may reach the end of its training."""
_NATIVE = 20.0
"""Seconds for py-spy."""
_LOGGING = 2.0
"""Seconds for writing into the log."""
_SUSPENDED = 15.0
"""Seconds by which a wait may end too late, or half of the limit if that is more: then the process was suspended."""
_DIAGNOSING = 10.0
"""Seconds for rank 0 to find out who is missing."""
_SAYING_SO = 1.0
"""Seconds for a failing rank to say so; the others notice its closed connections at once."""
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
        self.channel = open_channel(world)
        self.channel.set(f"node/{world.identity.rank}", world.identity.node)
        self._world = world
        self._beats_sent, self._orders = 0, 0
        self.closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()

    def close(self) -> None:
        """Training is over on this rank. The thread ends by itself, at the latest after an interval."""
        self.closing.set()

    def alarm(self, reason: str) -> None:
        """Ask rank 0 for a diagnosis now, because a communication of this rank has failed.

        Returns if that is for a reason which another rank tells, or if rank 0 does not answer in time; else the process ends.
        """
        self.channel.set("alarm", json.dumps({"rank": self.identity.rank, "reason": reason}))
        self.channel.comes(IGNORED, 2 * self.interval + _DIAGNOSING)

    def another_reason(self) -> bool:
        """Whether a rank fails with an error of its own; waits for it to say so."""
        time.sleep(_SAYING_SO)
        return self._world.store.check(["failed"])

    def beat(self) -> None:
        """Send a heartbeat."""
        self._beats_sent += 1
        self.channel.set(f"beat/{self.identity.rank}", beat_of(self.position, self._beats_sent).as_json())

    def wake(self) -> None:
        """This process was suspended, by the system or the scheduler: nothing was overdue meanwhile."""
        self.position.touch()

    def status(self) -> RankStatus:
        """This rank's status now."""
        return status_of(self.identity, self.position)

    def _run(self) -> None:
        try:
            self._watch()
        finally:
            self.channel.close()

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
        self.beat()
        key = f"order/{self._orders + 1}"
        if self.comes(key, self.interval):
            order = json.loads(self.channel.get([key])[0])
            self._orders += 1
            self.obey(order)

    def comes(self, key: str, seconds: float) -> bool:
        """Whether the key is set within so many seconds."""
        begin = time.monotonic()
        found = self.channel.comes(key, seconds)
        if time.monotonic() - begin > seconds + max(_SUSPENDED, self.limit / 2):
            self.wake()
        return found

    def obey(self, order: dict[str, object]) -> None:
        """Tell where this rank is, or end."""
        if order["kind"] == "tell":
            self.channel.set(f"status/{order['number']}/{self.identity.rank}", self.status().as_json())
            if order["stacks"]:
                aside(log_stacks)
        else:
            self.channel.set(f"ending/{self.identity.rank}", "")
            self.end(int(str(order["code"])))

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
        status = self.status()
        aside(log_stacks)
        if self.identity.local_rank == 0 or self.identity.rank == 1:  # one line of each node
            tell(
                f"hpctrain: watchdog: rank 0 has ended, or its node is out of reach ({error}); rank {status.rank} on {status.node} "
                f"was in {status.beat.where}, at {status.line}"
            )
        self.end(EXIT_TRAINING)


def aside(work: Callable[[], None], seconds: float = _LOGGING) -> None:
    """Do `work` that may block, on a thread of its own: a hung file system must not stop the watchdog."""
    thread = threading.Thread(target=work, name="watchdog's log", daemon=True)
    thread.start()
    thread.join(seconds)


def log_stacks() -> None:
    """Write all Python stacks into this rank's log, the native ones with py-spy, and the operations that have not ended."""
    LOG.info("the watchdog asks for all stacks\n%s", all_stacks())
    for process, stack in worker_stacks().items():
        LOG.info("process %d, which loads samples\n%s", process, stack)
    spy = shutil.which("py-spy")
    if spy is not None:
        words = [spy, "dump", "--native", "--pid", str(os.getpid())]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_NATIVE, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            LOG.info("py-spy failed: %s", error)
        else:
            LOG.info("py-spy, exit %d\n%s%s", done.returncode, done.stdout, done.stderr)
    operations = unfinished()
    LOG.info("operations that have not ended: %d%s", len(operations), "".join(f"\n{one}" for one in operations))


def log_nccl() -> None:
    """Write NCCL's report of all ranks into this rank's log."""
    if is_started() and (report := nccl_report()) is not None:
        LOG.info("NCCL's report\n%s", report)
