"""The ranks of one start: their numbers by node, and what their attendants tell."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from hpctrain.toolkit.commands import EnvironmentUnfitError, reason
from hpctrain.toolkit.starting import RankNumbers
from hpctrain_ray.attendant import Attendant, Place, Report, Task
from hpctrain_ray.order import Bundle, Order
from hpctrain_ray.placement import Placed

_START = 120.0
"""Seconds for the actors of a start to begin: Ray starts a Python process for each, which imports hpctrain."""
_SILENCE = 60.0
"""Seconds after which an attendant that does not answer counts as lost: Ray needs up to half of it to notice a lost node."""
_END = 5.0
"""Seconds for the attendants to end their ranks."""
_SECRET_BYTES = 32

Tell = Callable[[int, str, str], None]
"""Gets a line of a rank's output: the rank, "out" or "err", the text."""


class LostStartError(EnvironmentUnfitError):
    """An actor was lost, or was not there in time, before its rank has started: another start may do better."""


class _Seat:
    """A rank as the supervisor sees it."""

    def __init__(self, actor: Any, place: Place, bundle: Bundle) -> None:
        self.actor, self.place, self.bundle = actor, place, bundle
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


def actor_options(placed: Placed, index: int) -> dict[str, Any]:
    """The options of an actor in the bundle `index`, which takes all of it. It is never started again by itself."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = placed.bundles[index]
    return {
        "num_cpus": bundle.cpus,
        "num_gpus": bundle.gpus,
        "resources": dict(bundle.resources) or None,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(placed.group, placement_group_bundle_index=index),
        "max_restarts": 0,
    }


def numbers_by_node(places: Sequence[Place]) -> list[RankNumbers]:
    """The numbers of the ranks at these places: node by node, in the order in which the nodes come first."""
    nodes = list(dict.fromkeys(one.node for one in places))
    order = sorted(range(len(places)), key=lambda index: nodes.index(places[index].node))
    local: dict[str, int] = {}
    found = {}
    for rank, index in enumerate(order):
        node = places[index].node
        size = sum(one.node == node for one in places)
        found[index] = RankNumbers(rank, len(places), local.get(node, 0), size)
        local[node] = local.get(node, 0) + 1
    return [found[index] for index in range(len(places))]


def places_of(actors: Sequence[Any]) -> list[Place]:
    """The places where actors have started. Raises LostStartError if one does not in time."""
    import ray

    try:
        found: list[Place] = ray.get([one.place.remote() for one in actors], timeout=_START)
    except (ray.exceptions.RayError, TimeoutError) as error:
        raise LostStartError(
            f"the actors of {len(actors)} ranks did not all start within {_START:.0f} s ({first_line(error)}); expected "
            "hpctrain-ray, and the Python that is used here, on every node of the cluster"
        ) from None
    return found


def first_line(error: BaseException) -> str:
    """The sense of an error of Ray's, in one line."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in (reason(cause) if isinstance(cause, Exception) else str(cause)).splitlines()]
    return next((line for line in lines if line), type(error).__name__)


class Group:
    """Ranks that have started, one in each bundle of a placement group."""

    def __init__(self, placed: Placed, order: Order, resume: str, tell: Tell, begun: float) -> None:
        """Start the ranks. begun: when the job began, in seconds since 1970. Raises EnvironmentUnfitError."""
        import ray

        self._tell = tell
        actors = [
            ray.remote(Attendant).options(**actor_options(placed, index)).remote()
            for index in range(len(placed.bundles))
        ]
        self._seats: list[_Seat] = []
        try:
            places = places_of(actors)
            numbers = numbers_by_node(places)
            by_rank = sorted(range(len(actors)), key=lambda index: numbers[index].rank)
            self._seats = [_Seat(actors[index], places[index], placed.bundles[index]) for index in by_rank]
            self._start([numbers[index] for index in by_rank], order, resume, begun)
        except BaseException:
            self.end()
            raise

    def _start(self, numbers: Sequence[RankNumbers], order: Order, resume: str, begun: float) -> None:
        import ray

        token, secret = secrets.token_hex(8), secrets.token_bytes(_SECRET_BYTES)
        sets = [word for override in order.overrides for word in ("--set", override)]
        words = [*sets, "--resume", resume, "--begun", f"{begun:.3f}"]
        host = self._seats[0].place.address
        asked = [
            seat.actor.start.remote(Task(number, order.job, order.text, words, order.directory, token, secret, host))
            for seat, number in zip(self._seats, numbers, strict=True)
        ]
        for rank, (seat, one) in enumerate(zip(self._seats, asked, strict=True)):
            try:
                ray.get(one, timeout=_START)
            except (ray.exceptions.RayError, TimeoutError) as error:
                if isinstance(error, ray.exceptions.RayActorError):
                    continue  # the first look at it says so
                raise EnvironmentUnfitError(
                    f"rank {rank} could not start on {seat.place.address}: {first_line(error)}; expected the directory "
                    f"{order.directory}, and room in the directory for temporary files, on every node"
                ) from None

    def __len__(self) -> int:
        return len(self._seats)

    def where(self) -> str:
        """The nodes with their numbers of ranks, such as "10.0.0.1 (2), 10.0.0.2 (1)"."""
        counts: dict[tuple[str, str], int] = {}
        for seat in self._seats:
            place = seat.place.node, seat.place.address
            counts[place] = counts.get(place, 0) + 1
        return ", ".join(f"{address} ({count})" for (_, address), count in counts.items())

    def look(self, signals: Sequence[int], seconds: float) -> None:
        """Ask every rank how it is, and wait up to `seconds` for answers. signals: those that the ranks should have got by now."""
        import ray

        for seat in self._seats:
            if seat.asked is None and not seat.ended:
                seat.asked = seat.actor.report.remote(list(signals))
        asked = {seat.asked: (rank, seat) for rank, seat in enumerate(self._seats) if seat.asked is not None}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=seconds) if asked else ([], [])
        for reference in ready:
            self._hear(*asked[reference], reference)
        for seat in self._seats:
            if not seat.ended and time.monotonic() - seat.heard > _SILENCE:
                seat.lost = f"it did not answer for {_SILENCE:.0f} s"

    def _hear(self, rank: int, seat: _Seat, reference: Any) -> None:
        import ray

        seat.asked = None
        try:
            seat.report = ray.get(reference)
        except ray.exceptions.ActorUnavailableError:
            return  # the connection is broken: Ray will know whether the node is gone
        except ray.exceptions.RayActorError as error:
            seat.lost = self._why_lost(seat, error)
            return
        seat.heard = time.monotonic()
        for stream, text in seat.report.lines:
            self._tell(rank, stream, text)

    def _why_lost(self, seat: _Seat, error: Exception) -> str:
        import ray

        alive = {one["NodeID"] for one in ray.nodes() if one["Alive"]}
        if seat.place.node not in alive:
            return f"its node {seat.place.address} left the cluster"
        return f"its Ray worker on {seat.place.address} ended ({first_line(error)[:120]})"

    @property
    def has_failed(self) -> bool:
        """Whether a rank has failed or is lost."""
        return any(seat.failed for seat in self._seats)

    @property
    def has_ended(self) -> bool:
        """Whether no rank runs any more."""
        return all(seat.ended for seat in self._seats)

    @property
    def code(self) -> int | None:
        """The exit code that the ranks agreed on; None if none of them told one, as where one was killed."""
        told = [seat.report.code for seat in self._seats if seat.report is not None and seat.report.code is not None]
        if told:
            return next((code for code in told if code), 0 if not self.has_failed else None)
        return 0 if self.has_ended and not self.has_failed else None

    def losses(self) -> list[str]:
        """A clause for each rank that is lost or was killed, such as "rank 1: its node 10.0.0.2 left the cluster"."""
        found = []
        for rank, seat in enumerate(self._seats):
            if seat.lost:
                found.append(f"rank {rank}: {seat.lost}")
            elif seat.report is not None and (seat.report.status or 0) < 0 and seat.report.code is None:
                found.append(f"rank {rank}: killed by signal {-(seat.report.status or 0)} on {seat.place.address}")
        return found

    def end(self) -> None:
        """End all ranks that still run, and their actors."""
        import ray

        with suppress(ray.exceptions.RayError, TimeoutError):
            ending = [seat.actor.end.remote() for seat in self._seats if not seat.lost]
            ray.wait(ending, num_returns=len(ending), timeout=_END) if ending else None
        for seat in self._seats:
            with suppress(ray.exceptions.RayError, ValueError):
                ray.kill(seat.actor)
