"""The operations of one process set on this rank: submitted from any thread, negotiated, run, and waited for.

One thread at a time drives the negotiation and runs what was agreed: a thread that waits for a result, else the team's worker,
so that communication overlaps with the backward pass. There is no cycle time: what all ranks have submitted runs at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from hpctrain.base.side_stream import Done
from hpctrain.mpi import Patience, wait_until
from hpctrain_horovod.engine import request as kinds
from hpctrain_horovod.engine.beside import Beside
from hpctrain_horovod.engine.errors import HorovodInternalError
from hpctrain_horovod.engine.execution import Batch, Buffers, fused, run
from hpctrain_horovod.engine.lane import Lane
from hpctrain_horovod.engine.negotiation import Agreed, Negotiation
from hpctrain_horovod.engine.request import Key, title
from hpctrain_horovod.engine.settings import EngineSettings
from hpctrain_horovod.engine.stall import StallCheck
from hpctrain_horovod.engine.submission import Submission
from hpctrain_horovod.engine.timeline import Timeline

_IDLE = 0.1  # seconds between two looks for messages without submissions of this rank
_LOOK = 1.0  # seconds between two looks at stalled operations
_CUT_AFTER = 30.0
"""Seconds in which what runs on an accelerator ends by itself after a rank has ended, which took part in it or is lost."""


class Team:
    """This rank's part in the operations of a process set."""

    def __init__(
        self,
        ranks: Sequence[int],
        negotiation: Negotiation,
        lane_for: Callable[[str], Lane],
        store: Store,
        settings: EngineSettings,
        timeline: Timeline,
        *,
        may_lose_ranks: bool,
    ) -> None:
        """ranks: the set's members among all ranks. lane_for: the data path of a kind of device; collective.

        may_lose_ranks: the program goes on without a lost rank, so it must not read what an accelerator never gets.
        """
        self.ranks = list(ranks)
        self.rank, self.size = negotiation.rank, len(self.ranks)
        self.submitted = 0
        """The number of operations so far, to match those without a name."""
        self.ended: str | None = None
        self._ended_at, self._cut = 0.0, False
        self._running: deque[tuple[Batch, Sequence[Submission | None], float, Done]] = deque()
        """Batches whose results may not be there yet, for the timeline."""
        self.run_process_set: Callable[[Agreed], Any] | None = None
        self._negotiation, self._lane_for, self._lanes = negotiation, lane_for, dict[str, Lane]()
        self._settings, self._timeline, self._buffers, self._beside = settings, timeline, Buffers(), Beside()
        self._may_lose_ranks = may_lose_ranks
        self._stall = StallCheck(store, self.ranks, self.rank, settings)
        self._looked = time.monotonic()
        self._changed = threading.Condition()
        self._new: deque[Submission] = deque()
        self._mine: dict[Key, Submission] = {}
        self._driving, self._waiters, self._ending, self._stopped = False, 0, False, False
        self._worker = threading.Thread(target=self._work, name=f"horovod of {self.size} ranks", daemon=True)
        self._worker.start()

    def submit(self, submissions: Sequence[Submission], *, waits: bool) -> None:
        """Submit operations that start together. waits: the caller waits for them at once, so the worker need not begin.

        Raises HorovodInternalError after a shutdown, ValueError if an operation of the same name is in flight.
        """
        self._beside.submitted(submissions)
        with self._changed:
            if self.ended is not None:
                raise HorovodInternalError(self.ended)
            for submission in submissions:
                if submission.key in self._mine:
                    raise ValueError(
                        f"found a second {title(submission.key)} before the first one has finished; give each operation "
                        "in flight a name of its own"
                    )
            self._mine.update((submission.key, submission) for submission in submissions)
            self._new.extend(submissions)
            if not waits:
                self._changed.notify_all()

    def wait(self, submission: Submission) -> None:
        """Return when the result is there, or the operation has failed; `submission.error` tells.

        The result of an accelerator is there for what this thread launches from now on.
        """
        if not self._is_there(submission):
            self._wait(submission)
        if self._cut and submission.request.device != "cpu" and submission.error is None:
            submission.error = HorovodInternalError(self.ended)
        if submission.error is None:
            results = submission.result if isinstance(submission.result, tuple) else (submission.result,)
            submission.over.before_computing(one for one in results if isinstance(one, Tensor))

    def _is_there(self, submission: Submission) -> bool:
        return submission.is_over() if self._may_lose_ranks else submission.done

    def _wait(self, submission: Submission) -> None:
        with self._changed:
            self._waiters += 1
        try:
            while not self._is_there(submission):
                if self._ending:
                    self._rest()
                elif self._takes_over():
                    try:
                        self._drive(lambda: self._is_there(submission) or self._ending, Patience.LONG)
                    finally:
                        self._hand_over()
        finally:
            with self._changed:
                self._waiters -= 1
                self._changed.notify_all()

    def end(self, reason: str, grace: float) -> None:
        """Wait up to `grace` seconds for this rank's operations; fail all others, here and on all ranks, and end the worker."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        while not self._takes_over():
            continue
        try:
            # what the others have been told to run needs this rank
            give_up = time.perf_counter() + grace
            wait_until(self._has_nothing_left, give_up, Patience.LONG, notice_after=grace, notice=lambda: None)
            # a program may be far ahead of its accelerator, and go on with the results
            give_up = time.perf_counter() + _CUT_AFTER
            wait_until(self._is_over, give_up, Patience.LONG, notice_after=_CUT_AFTER, notice=lambda: None)
            self._cut = self._cut or not self._beside.is_over()
            if self._negotiation.ended is None:
                self._negotiation.end(reason)
            self._fail_all(reason)
        finally:
            with self._changed:
                self._stopped = True
            self._hand_over()
        if threading.current_thread() is not self._worker:
            self._worker.join()

    def _has_nothing_left(self) -> bool:
        self._advance()
        return not self._mine

    def _is_over(self) -> bool:
        self._advance()
        return self._cut or self._beside.is_over()

    def _rest(self) -> None:
        with self._changed:
            self._changed.wait(_IDLE)

    def _takes_over(self) -> bool:
        with self._changed:
            if self._driving:
                self._changed.wait(_LOOK)
            if self._driving:
                return False
            self._driving = True
            return True

    def _hand_over(self) -> None:
        with self._changed:
            self._driving = False
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                idle = False
                while not self._stopped and (
                    self._driving or self._waiters or self._ending or not (self._mine or idle)
                ):
                    idle = not self._changed.wait(_IDLE)
                if self._stopped:
                    return
                self._driving = True
            try:
                self._drive(lambda: bool(self._waiters or not self._mine or self._ending), Patience.LONG)
            finally:
                self._hand_over()

    def _drive(self, until: Callable[[], bool], patience: Patience) -> None:
        def advanced() -> bool:
            self._advance()
            return until()

        while not wait_until(
            advanced, time.perf_counter() + _LOOK, patience, notice_after=_LOOK, notice=self._look_for_stalls
        ):
            self._look_for_stalls()
        self._look_for_stalls()

    def _advance(self) -> None:
        """Submit what is new to the negotiation, and run what was agreed."""
        while self._new:
            submission = self._new.popleft()
            self._negotiation.submit(submission.request, submission.number, submission.value)
        while together := self._negotiation.progress():
            self._timeline.mark_cycle()
            for batch in fused(together, self._settings.fusion_bytes):
                self._run(batch)
        self._record()
        if self._negotiation.ended is not None:
            if self.ended is None:
                self._fail_all(self._negotiation.ended)
            self._cut_off()

    def _run(self, batch: Batch) -> None:
        mine = [self._mine.get(one.key) for one in batch]
        begin = time.monotonic()
        error = None if batch[0].error is None else HorovodInternalError(batch[0].error)
        results: list[Any] = [None] * len(batch)
        over = Done()
        if error is None:
            try:
                results, over = self._results(batch, mine)
            except Exception as failure:
                error = HorovodInternalError(f"{title(batch[0].key)} failed: {failure}")
                error.__cause__ = failure
                self._negotiation.end(str(error))  # the ranks may no longer be in step
        self._running.append((batch, mine, begin, over))
        self._record()
        with self._changed:
            for submission, result in zip(mine, results, strict=True):
                if submission is not None and self._mine.pop(submission.key, None) is not None:
                    submission.finish(result, error, over)
            self._changed.notify_all()

    def _record(self) -> None:
        """Write the batches that are over into the timeline."""
        while self._running and self._running[0][-1].is_over():
            batch, mine, begin, _ = self._running.popleft()
            self._timeline.record(batch, mine, begin)

    def _results(self, batch: Batch, mine: Sequence[Submission | None]) -> tuple[list[Any], Done]:
        """The results of a batch, and when they are there."""
        first, device = batch[0], batch[0].request.device
        if first.request.kind == kinds.BARRIER:
            return [None], Done()
        if first.request.kind == kinds.JOIN:
            return [first.values[0]], Done()
        if first.request.kind == kinds.PROCESS_SET:
            assert self.run_process_set is not None  # only the set of all ranks is asked to
            return [self.run_process_set(first)], Done()

        def moved() -> list[Any]:
            if device not in self._lanes:
                self._lanes[device] = self._lane_for(device)
            return run(batch, mine, self._lanes[device], self._buffers)

        return (moved(), Done()) if device == "cpu" else self._beside.launch(device, mine, moved)

    def _cut_off(self) -> None:
        """End what runs on an accelerator and can't come to its end: a rank that takes part in it is lost."""
        if self._cut or time.monotonic() - self._ended_at < _CUT_AFTER or self._beside.is_over():
            return
        self._cut = True
        for device, lane in self._lanes.items():
            if device != "cpu":
                lane.abort()

    def _fail_all(self, reason: str) -> None:
        with self._changed:
            self.ended, self._ended_at = reason, time.monotonic()
            for submission in self._mine.values():
                submission.finish(error=HorovodInternalError(reason))
            self._mine.clear()
            self._new.clear()
            self._changed.notify_all()

    def _look_for_stalls(self) -> None:
        if time.monotonic() - self._looked < _LOOK or self.ended is not None:
            return
        self._looked = time.monotonic()
        reason = self._stall.look(list(self._mine.values()))
        if reason is not None:
            self._negotiation.end(reason)
