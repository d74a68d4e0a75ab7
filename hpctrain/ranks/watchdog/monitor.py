"""The watchdog of a run: no job waits in silence, and none waits forever.

Rank 0's thread reads the heartbeats, asks all ranks when one is overdue, prints, and ends the job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NoReturn

from hpctrain.base.errors import EXIT_TRAINING, name_ranks
from hpctrain.mpi.errors import OperationMismatchError
from hpctrain.ranks.meeting import World
from hpctrain.ranks.prints import tell
from hpctrain.ranks.watchdog.position import END, Position, is_unlimited
from hpctrain.ranks.watchdog.queries import Queries
from hpctrain.ranks.watchdog.stacks import failed_line
from hpctrain.ranks.watchdog.status import Beat, RankStatus, Silent, beat_of, sentences, status_of
from hpctrain.ranks.watchdog.watcher import IGNORED, Watcher, aside, log_stacks

LOG = logging.getLogger("hpctrain")

_LOOK = 2.0  # seconds between two looks for alarms and questions, if heartbeats come less often
_SAYING_SO = 1.0  # seconds for a rank that fails by itself to say so; the others notice its closed connections at once
_ANSWERING = 3.0  # seconds for the ranks to answer: those that run do so at once
# the words of torch's, gloo's and hpctrain's own errors about other ranks that take too long or are gone
_FAILED = re.compile(
    r"time[d ]*out|(did|has) not finish|waited .* in the store|connection (closed|reset|refused)|broken pipe|failed in MPI"
    "|remote error",
    re.IGNORECASE,
)


@contextmanager
def watched(
    world: World, nodes: Sequence[str], position: Position, limit: float, queries: Queries
) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Watch the run in this context. limit: seconds that a phase may take, or a rank may be silent. queries: those to rank 0.

    Gives a context for work that communicates: if communication fails there, by its own time limit or because a rank is gone, rank
    0 says where all ranks stand. nodes: of the ranks.
    """
    is_chief = world.identity.rank == 0
    watcher = Monitor(world, nodes, position, limit, queries) if is_chief else Watcher(world, position, limit)
    if is_chief:
        queries.start()
    watcher.start()
    try:
        yield partial(_alarmed, watcher)
    finally:
        watcher.close()
        if is_chief:
            queries.close(f"the job ends after step {position.step + 1}")


@contextmanager
def _alarmed(watcher: Watcher) -> Iterator[None]:
    try:
        yield
    except OperationMismatchError:
        raise  # no rank is missing
    except RuntimeError as error:
        line = failed_line(error.__traceback__) if watcher.identity.size > 1 and _FAILED.search(str(error)) else None
        if line is not None:
            watcher.position.failure = line
            LOG.info("a communication failed", exc_info=True)
            with contextlib.suppress(RuntimeError):  # the store is gone, too
                watcher.alarm(str(error).partition("\n")[0])
        raise


class Monitor(Watcher):
    """The watcher of rank 0."""

    def __init__(self, world: World, nodes: Sequence[str], position: Position, limit: float, asked: Queries) -> None:
        """nodes: of the ranks, for those that don't answer."""
        super().__init__(world, position, limit)
        self._asked, self._nodes = asked, nodes
        self._others = range(1, self.identity.size)
        self._beats: dict[int, Beat] = {}
        self._heard = dict.fromkeys(self._others, time.monotonic())
        self._asking, self._long, self._next = 0, 0, 0.0

    def turn(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self.interval
            self._read()
        alarm = self._alarm()
        if self.closing.is_set() or self.position.phase == END:  # the others may have ended before
            return
        overdue = self._overdue()
        if alarm is not None:
            self._look_into(alarm)
        # somebody may sit in front of a single rank in a terminal or a notebook; a starter's has no input
        elif overdue and (self.identity.size > 1 or not (os.isatty(0) or hasattr(sys, "ps1"))):
            self._end_if_still(overdue)
        elif self._is_long():
            why = f"the start takes longer than {self.limit * self._long:g} s"
            self._print(why, *self._ask(stacks=True), self.limit)
        elif self._asked.is_waiting:
            self._asked.answer(sentences(*self._ask(stacks=False), self.limit))
        idle = self.position.idle
        self._asked.acknowledge(beat_of(self.position).where + (f" for {idle:.0f} s" if idle >= 1 else ""))

    def _look_into(self, alarm: dict[str, Any]) -> None:
        """End the job because of an alarm, unless a rank that has failed is the reason and may still end it in order."""
        if "code" in alarm:
            self._end_ranks(alarm["code"])
        time.sleep(_SAYING_SO)
        if self._world.store.check(["failed"]):
            self.store.set(IGNORED, "")
        else:
            why = f"a communication of rank {alarm['rank']} failed ({alarm['reason']}; its log has the traceback)"
            self._end_job(why, *self._ask(stacks=True), limit=0.0)  # it has not waited for as long as phases may take

    def _end_if_still(self, overdue: list[str]) -> None:
        """End the job, unless all have moved after all."""
        statuses, silent = self._ask(stacks=True)
        still = any(status.beat.is_overdue(self.limit) for status in statuses)
        still = still or any(one.seconds > self.limit for one in silent)
        if still and not self.closing.is_set() and self.position.phase != END:
            self._end_job(" and ".join(overdue), statuses, silent, self.limit)

    def wake(self) -> None:
        super().wake()
        self._heard = dict.fromkeys(self._heard, time.monotonic())

    def _alarm(self) -> dict[str, Any] | None:
        if not self.comes("alarm", min(self.interval, _LOOK)):
            return None
        alarm: dict[str, Any] = json.loads(self.store.get("alarm"))
        self.store.delete_key("alarm")
        return alarm

    def _read(self) -> None:
        """Take the newest heartbeats."""
        self._beats[0] = beat_of(self.position)
        for key, text in self._those_set([f"beat/{rank}" for rank in self._others]).items():
            rank, beat = int(key.partition("/")[2]), Beat(*json.loads(text))
            if self._beats.get(rank) != beat:
                self._beats[rank], self._heard[rank] = beat, time.monotonic()

    def _overdue(self) -> list[str]:
        """Clauses about what is overdue."""
        clauses = []
        silent = [rank for rank, heard in self._heard.items() if time.monotonic() - heard > self.limit]
        if silent:
            clauses.append(f"{name_ranks(silent)} sent no heartbeat for {self.limit:g} s")
        beats = self._beats
        idle = [rank for rank, beat in beats.items() if beat.is_overdue(self.limit) and rank not in silent]
        if idle:
            longest = beats[max(idle, key=lambda rank: beats[rank].idle)]
            clauses.append(
                f"{name_ranks(idle)} did not move for {self.limit:g} s (step {longest.step + 1}, {longest.phase})"
            )
        return clauses

    def _is_long(self) -> bool:
        """Whether it is time to tell that a phase without a limit takes long: each time the limit has passed."""
        idle = max((beat.idle for beat in self._beats.values() if is_unlimited(beat.phase)), default=0.0)
        before, self._long = self._long, int(idle / self.limit)
        return self._long > before

    def _print(self, why: str, statuses: list[RankStatus], silent: list[Silent], limit: float) -> None:
        """Print who waits for whom."""
        shown = [
            f"hpctrain: watchdog: {why}",
            *(f"  {line}" for line in sentences(statuses, silent, limit)),
            "  the stacks of all threads are in the ranks' logs; [watchdog] timeout_seconds is the limit of a phase",
        ]
        tell("\n".join(shown))
        aside(partial(LOG.info, "%s", "\n".join(shown)))

    def _end_job(self, why: str, statuses: list[RankStatus], silent: list[Silent], limit: float) -> None:
        """Print who waits for whom, and end all ranks."""
        self._print(why, statuses, silent, limit)
        self._world.channel.report_error(f"watchdog: {why}")
        self._end_ranks(EXIT_TRAINING, {status.rank for status in statuses})

    def _end_ranks(self, code: int, answering: Iterable[int] = ()) -> NoReturn:
        """End all ranks. answering: those that will confirm it."""
        with contextlib.suppress(RuntimeError):
            self._order({"code": code})
            self._await([f"ending/{rank}" for rank in answering if rank != 0])
        self.end(code)

    def _ask(self, *, stacks: bool) -> tuple[list[RankStatus], list[Silent]]:
        """Every rank's status; of those that do not answer what is known."""
        self._asking += 1
        self._order({"number": self._asking, "stacks": stacks})
        statuses = [status_of(self.identity, self.position)]
        if stacks:
            aside(log_stacks)
        keys = [f"status/{self._asking}/{rank}" for rank in self._others]
        self._await(keys)
        self._read()
        for key, text in self._those_set(keys).items():
            statuses.append(RankStatus.from_json(text))
            self.store.delete_key(key)
        now, answering = time.monotonic(), {status.rank for status in statuses}
        last = {rank: f"last seen in {beat.where}" for rank, beat in self._beats.items()}
        return statuses, [
            Silent(rank, self._nodes[rank], now - self._heard[rank], last.get(rank, "never seen"))
            for rank in self._others if rank not in answering
        ]  # fmt: skip

    def _order(self, order: dict[str, object]) -> None:
        self._orders += 1
        self.store.set(f"order/{self._orders}", json.dumps(order))

    def _those_set(self, keys: Sequence[str]) -> dict[str, bytes]:
        """The values of the keys that are set."""
        there = keys if self.store.check(list(keys)) else [key for key in keys if self.store.check([key])]
        return dict(zip(there, self.store.multi_get(list(there)), strict=True)) if there else {}

    def _await(self, keys: Sequence[str]) -> None:
        """Wait until the keys are set, for as long as the ranks may take to answer."""
        give_up = time.monotonic() + _ANSWERING
        while not self.store.check(list(keys)) and time.monotonic() < give_up:
            time.sleep(0.02)
