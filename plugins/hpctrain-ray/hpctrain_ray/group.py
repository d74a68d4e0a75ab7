"""The ranks of one start: their numbers by node, and what their attendants tell."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hpctrain.starting.channel_directory import Ending
from hpctrain.toolkit.commands import EnvironmentUnfitError
from hpctrain_ray.attendant import Attendant, RankStart, Report
from hpctrain_ray.errors import first_line
from hpctrain_ray.order import Order
from hpctrain_ray.placement import Placed
from hpctrain_ray.pmi import PmiActor
from hpctrain_ray.private_directories import new_secret
from hpctrain_ray.seats import Seat, end_actors, take_seats

_START = 120.0
"""Seconds for the attendants to start their ranks' processes."""
_SILENCE = 60.0
"""Seconds after which an attendant that does not answer counts as lost: Ray needs up to half of it to notice a lost node."""
_END = 5.0
"""Seconds for the attendants to end their ranks."""

Tell = Callable[[int, str, str], None]
"""Gets a line of a rank's output: the rank, "out" or "err", the text."""


class _Attended:
    """A rank as the supervisor sees it."""

    def __init__(self, seat: Seat) -> None:
        self.actor, self.node, self.numbers = seat.actor, seat.node, seat.numbers
        self.asked: Any = None
        self.heard = time.monotonic()
        self.report: Report | None = None
        self.lost = ""

    @property
    def ended(self) -> bool:
        """Whether the rank runs no more, as far as it is known."""
        return bool(self.lost) or (self.report is not None and self.report.status is not None)

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error, or is lost."""
        return bool(self.lost) or (self.report is not None and bool(self.report.status))


class Group:
    """Ranks that have started, one in each bundle of a placement group."""

    def __init__(self, placed: Placed, order: Order, resume: str, tell: Tell, begun: float) -> None:
        """Start the ranks. begun: when the job began, in seconds since 1970. Raises EnvironmentUnfitError."""
        self._tell = tell
        self._pmi: Any = None
        self._ranks = [_Attended(seat) for seat in take_seats(placed, Attendant)]
        try:
            self._start(order, resume, begun)
        except BaseException:
            self.end()
            raise

    def _start(self, order: Order, resume: str, begun: float) -> None:
        import ray

        token, secret = secrets.token_hex(8), new_secret()
        sets = [word for override in order.overrides for word in ("--set", override)]
        words = [*sets, "--resume", resume, "--begun", f"{begun:.3f}"]
        host = self._ranks[0].node.address
        if order.over_mpi:
            self._pmi = ray.remote(PmiActor).options(num_cpus=0).remote(self._counts())
        asked = []
        for one in self._ranks:
            start = RankStart(
                one.numbers, order.job, order.text, words, order.directory, token, secret, host, self._pmi
            )
            asked.append(one.actor.start.remote(start))
        for rank, (one, started) in enumerate(zip(self._ranks, asked, strict=True)):
            try:
                ray.get(started, timeout=_START)
            except (ray.exceptions.RayError, TimeoutError) as error:
                if isinstance(error, ray.exceptions.RayActorError):
                    continue  # the first look at it says so
                if isinstance(cause := getattr(error, "cause", None), EnvironmentUnfitError):
                    raise cause from None
                raise EnvironmentUnfitError(
                    f"rank {rank} could not start on {one.node.address}: {first_line(error)}; expected the directory "
                    f"{order.directory}, and room in the directory for temporary files, on every node"
                ) from None

    def __len__(self) -> int:
        return len(self._ranks)

    def _counts(self) -> list[int]:
        """The ranks of each node, in the order of the nodes."""
        return list(Counter(one.node.id for one in self._ranks).values())

    def where(self) -> str:
        """The nodes with their numbers of ranks, such as "10.0.0.1 (2), 10.0.0.2 (1)"."""
        counts = Counter((one.node.id, one.node.address) for one in self._ranks)
        return ", ".join(f"{address} ({count})" for (_, address), count in counts.items())

    def look(self, signals: Sequence[int], seconds: float) -> None:
        """Ask every rank how it is, and wait up to `seconds` for answers. signals: those that the ranks should have got by now."""
        import ray

        for one in self._ranks:
            if one.asked is None and not one.ended:
                one.asked = one.actor.report.remote(list(signals))
        asked = {one.asked: (rank, one) for rank, one in enumerate(self._ranks) if one.asked is not None}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
        for reference in ready:
            self._hear(*asked[reference], reference)
        for one in self._ranks:
            if not one.ended and time.monotonic() - one.heard > _SILENCE:
                one.lost = f"it did not answer for {_SILENCE:.0f} s"

    def _hear(self, rank: int, one: _Attended, reference: Any) -> None:
        import ray

        one.asked = None
        try:
            one.report = ray.get(reference)
        except ray.exceptions.ActorUnavailableError:
            return  # the connection is broken: Ray will know whether the node is gone
        except ray.exceptions.RayError as error:  # its process, its node, or its answer on the way
            one.lost = self._why_lost(one, error)
            return
        one.heard = time.monotonic()
        for stream, text in one.report.lines:
            self._tell(rank, stream, text)

    def _why_lost(self, one: _Attended, error: Exception) -> str:
        import ray

        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if one.node.id not in alive:
            return f"its node {one.node.address} left the cluster"
        return f"its Ray worker on {one.node.address} ended ({first_line(error)[:120]})"

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed or is lost."""
        return any(one.failed for one in self._ranks)

    @property
    def has_ended(self) -> bool:
        """Whether no rank runs any more."""
        return all(one.ended for one in self._ranks)

    @property
    def code(self) -> int | None:
        """The exit code that the ranks agreed on; None if none of them told one, as where one was killed."""
        told = [ending.code for ending in self._endings() if ending.code is not None]
        if told:
            return next((code for code in told if code), 0 if not self.has_failed else None)
        return 0 if self.has_ended and not self.has_failed else None

    @property
    def error(self) -> str:
        """The error with which the ranks have ended; empty if they told none."""
        return next((ending.error for ending in self._endings() if ending.error), "")

    def _endings(self) -> list[Ending]:
        return [one.report.ending for one in self._ranks if one.report is not None]

    def losses(self) -> list[str]:
        """A clause for each rank that is lost or was killed, such as "rank 1: its node 10.0.0.2 left the cluster"."""
        found = []
        for rank, one in enumerate(self._ranks):
            if one.lost:
                found.append(f"rank {rank}: {one.lost}")
            elif one.report is not None and (one.report.status or 0) < 0 and one.report.ending.code is None:
                found.append(f"rank {rank}: killed by signal {-(one.report.status or 0)} on {one.node.address}")
        return found

    def end(self) -> None:
        """End all ranks that still run, and their actors."""
        import ray

        with suppress(ray.exceptions.RayError, TimeoutError):
            ending = [one.actor.end.remote() for one in self._ranks if not one.lost]
            ray.wait(ending, num_returns=len(ending), timeout=_END) if ending else None
        end_actors([*(one.actor for one in self._ranks), *([] if self._pmi is None else [self._pmi])])
