"""Rank 0's thread of the watchdog: it reads the heartbeats, asks all ranks when one is overdue, prints, and ends the job."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

from hpctrain.base.errors import EXIT_TRAINING
from hpctrain.mpi.errors import name_ranks
from hpctrain.ranks.meeting import World
from hpctrain.ranks.prints import tell
from hpctrain.ranks.watchdog.diagnosis import Silent, sentences
from hpctrain.ranks.watchdog.position import END, Position, is_unlimited
from hpctrain.ranks.watchdog.queries import Queries
from hpctrain.ranks.watchdog.status import Beat, RankStatus, beat_of
from hpctrain.ranks.watchdog.watcher import IGNORED, Watcher, aside, log_nccl, log_stacks

LOG = logging.getLogger("hpctrain")

_LOOK = 2.0
"""Seconds between two looks for alarms and questions, if heartbeats come less often."""
_NCCL = 12.0
"""Seconds for NCCL's report, whose ranks may not answer it either."""
_ANSWERING = 3.0
"""Seconds for the ranks to answer: those that run do so at once."""


class Monitor(Watcher):
    """The watcher of rank 0."""

    def __init__(self, world: World, position: Position, limit: float, asked: Queries) -> None:
        super().__init__(world, position, limit)
        self._asked = asked
        self._beats: dict[int, Beat] = {}
        self._heard = dict.fromkeys(range(self.identity.size), time.monotonic())
        self._asking, self._long, self._next = 0, 0, 0.0
        asked.start(self.closing)

    def turn(self) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self.interval
            self.beat()
            self._read()
        alarm = self._alarm()
        if self.closing.is_set() or self.position.phase == END:  # the others may have ended before
            return
        overdue = self._overdue()
        if alarm is not None:
            self._look_into(alarm)
        elif overdue and not self._is_debugged():
            self._end_if_still(overdue)
        elif self._is_long():
            why = f"the start takes longer than {self.limit * self._long:g} s"
            self._print(why, *self._ask(stacks=True), self.limit)
        elif self._asked.is_waiting:
            self._asked.answer(sentences(*self._ask(stacks=False), self.limit))
        self._asked.acknowledge(self._where())

    def _where(self) -> str:
        idle = self.position.idle
        return beat_of(self.position, 0).where + (f" for {idle:.0f} s" if idle >= 1 else "")

    def _look_into(self, alarm: dict[str, Any]) -> None:
        """End the job because of an alarm, unless a rank that has failed is the reason and may still end it in order."""
        if "code" in alarm:
            self._end_ranks(alarm["code"])
        elif self.another_reason():
            self.channel.set(IGNORED, "")
        else:
            why = f"a communication of rank {alarm['rank']} failed ({alarm['reason']}; its log has the traceback)"
            self._end_job(why, *self._ask(stacks=True), limit=0.0)

    def _end_if_still(self, overdue: list[str]) -> None:
        """End the job, unless all have moved after all."""
        statuses, silent = self._ask(stacks=True)
        still = any(status.beat.is_overdue(self.limit) for status in statuses)
        still = still or any(one.seconds > self.limit for one in silent)
        if still and not self.closing.is_set() and self.position.phase != END:
            self._end_job(" and ".join(overdue), statuses, silent)

    def wake(self) -> None:
        super().wake()
        self._heard = dict.fromkeys(self._heard, time.monotonic())

    def _is_debugged(self) -> bool:
        """Whether somebody may sit in front of this process: a single rank in a terminal or a notebook may wait."""
        try:
            terminal = sys.stdin is not None and sys.stdin.isatty()
        except ValueError:  # it is closed
            terminal = False
        return self.identity.size == 1 and (terminal or hasattr(sys, "ps1"))

    def _alarm(self) -> dict[str, Any] | None:
        if not self.comes("alarm", min(self.interval, _LOOK)):
            return None
        alarm: dict[str, Any] = json.loads(self.channel.get(["alarm"])[0])
        self.channel.remove("alarm")
        return alarm

    def _read(self) -> None:
        now = time.monotonic()
        keys = [f"beat/{rank}" for rank in range(self.identity.size)]
        there = keys if self.channel.are_set(keys) else [key for key in keys if self.channel.are_set([key])]
        for key, text in zip(there, self.channel.get(there), strict=True):
            rank, beat = int(key.partition("/")[2]), Beat.from_json(text)
            if self._beats.get(rank) != beat:
                self._beats[rank], self._heard[rank] = beat, now

    def _overdue(self) -> list[str]:
        """Clauses about what is overdue."""
        found = []
        silent = [rank for rank, heard in self._heard.items() if time.monotonic() - heard > self.limit]
        if silent:
            found.append(f"{name_ranks(silent)} sent no heartbeat for {self.limit:g} s")
        beats = self._beats
        idle = [rank for rank, beat in beats.items() if beat.is_overdue(self.limit) and rank not in silent]
        if idle:
            longest = beats[max(idle, key=lambda rank: beats[rank].idle)]
            found.append(
                f"{name_ranks(idle)} did not move for {self.limit:g} s (step {longest.step + 1}, {longest.phase})"
            )
        return found

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

    def _end_job(self, why: str, statuses: list[RankStatus], silent: list[Silent], limit: float | None = None) -> None:
        """Print who waits for whom, and end all ranks. limit: 0 if what failed has not waited for as long as phases may take."""
        self._print(why, statuses, silent, self.limit if limit is None else limit)
        self._world.channel.report_error(f"watchdog: {why}")
        aside(log_nccl, _NCCL)
        self._end_ranks(EXIT_TRAINING, {status.rank for status in statuses})

    def _end_ranks(self, code: int, answering: Iterable[int] = ()) -> NoReturn:
        """End all ranks. answering: those that will confirm it."""
        with contextlib.suppress(RuntimeError):
            self._order({"kind": "end", "code": code})
            others = [f"ending/{rank}" for rank in answering if rank != self.identity.rank]
            if others:
                self._until(lambda: self.channel.are_set(others))
        self.end(code)

    def _ask(self, *, stacks: bool) -> tuple[list[RankStatus], list[Silent]]:
        """Every rank's status; of those that do not answer what is known."""
        self._asking += 1
        others = [rank for rank in range(self.identity.size) if rank != self.identity.rank]
        keys = {rank: f"status/{self._asking}/{rank}" for rank in others}
        if others:
            self._order({"kind": "tell", "number": self._asking, "stacks": stacks})
        statuses = [self.status()]
        if stacks:
            aside(log_stacks)
        if others:
            self._until(lambda: self.channel.are_set(list(keys.values())))
        self._read()
        for key in keys.values():
            if self.channel.are_set([key]):
                statuses.append(RankStatus.from_json(self.channel.get([key])[0]))
                self.channel.remove(key)
        told = {status.rank for status in statuses}
        return statuses, [self._silent(rank) for rank in others if rank not in told]

    def _silent(self, rank: int) -> Silent:
        beat = self._beats.get(rank)
        key = f"node/{rank}"
        node = self.channel.get([key])[0].decode() if self.channel.are_set([key]) else "an unknown node"
        return Silent(rank, node, time.monotonic() - self._heard[rank], beat)

    def _order(self, order: dict[str, object]) -> None:
        self.channel.set(f"order/{self._orders + 1}", json.dumps(order))
        self._orders += 1

    def _until(self, true: Callable[[], bool]) -> None:
        """Wait until it is true, for as long as the ranks may take to answer."""
        give_up = time.monotonic() + _ANSWERING
        while not true() and time.monotonic() < give_up:
            time.sleep(0.02)
