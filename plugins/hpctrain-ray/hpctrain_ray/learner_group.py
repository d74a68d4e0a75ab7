"""The ranks of a `Training`: their actors, calls to all of them, and what it means that one fails."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.api import HpctrainError, TrainingError
from hpctrain.starting.channel_directory import Ending
from hpctrain_ray.errors import error_of, first_line
from hpctrain_ray.learner import Learner
from hpctrain_ray.placement import Placed
from hpctrain_ray.private_directories import new_secret, take_ending
from hpctrain_ray.rank import Entry, LearnerRank, Position
from hpctrain_ray.seats import LostStartError, Seat, end_actors, take_seats

_CALL = 3600.0
"""Seconds for a call to all ranks. A rank that hangs is found before by the job's watchdog."""
_SETTLE = 60.0
"""Seconds for all ranks to end after one has failed: Ray needs up to half of it to notice a lost node."""
_ASK = 120.0
"""Seconds for what needs an actor or a node: Ray may have to start a Python process there."""
_FORGET = 1.0


class LostRankError(TrainingError):
    """A rank's process or node is gone: ranks that are placed anew may do better."""


class LearnerGroup:
    """Ranks in a loop, one in each bundle of a placement group. An error of one, and `end`, ends all."""

    def __init__(self, placed: Placed, make: Callable[[], Learner]) -> None:
        """Start the actors. make: the learner of each rank. Raises LostStartError."""
        import ray

        self._placed = placed
        try:
            self._seats = take_seats(placed, LearnerRank, make)
            token, secret = secrets.token_hex(8), new_secret()
            asked = [one.actor.prepare.remote(token, one.numbers.rank, secret) for one in self._seats]
            self._directories: list[Path] = ray.get(asked, timeout=_ASK)
        except BaseException as error:
            placed.remove()
            if not isinstance(error, (ray.exceptions.RayError, TimeoutError)):
                raise
            raise LostStartError(
                f"a rank could not prepare its start: {first_line(error)}; expected room in the directory for temporary files on "
                "every node"
            ) from None
        self.data_ranks: list[int] = []
        """The place of each rank among those with different samples; there when they have entered."""
        self.data_size = 1

    @property
    def seats(self) -> Sequence[Seat]:
        """The actors and their places, in the order of the ranks."""
        return self._seats

    def enter(self, tables: Mapping[str, Any], directory: Path, resume: str) -> Position:
        """Let all ranks enter the loop of a job's tables. directory: where relative paths start."""
        host = self._seats[0].node.address
        entries = [Entry(one.numbers, host, tables, directory, resume) for one in self._seats]
        told = self.call("enter", entries)
        self.data_ranks, self.data_size = [rank for _, rank, _ in told], told[0][2]
        position: Position = told[0][0]
        return position

    def call(self, method: str, arguments: Sequence[Any] | None = None) -> list[Any]:
        """Every rank's answer. After an error, all ranks are ended.

        arguments: one for each rank, or None. Raises LostRankError if a rank is gone, and else the error of a rank.
        """
        import ray

        given = [()] * len(self._seats) if arguments is None else [(one,) for one in arguments]
        asked = [getattr(seat.actor, method).remote(*words) for seat, words in zip(self._seats, given, strict=True)]
        left, until = list(asked), time.monotonic() + _CALL
        try:
            while left:
                ready, left = ray.wait(left, timeout=max(0.0, until - time.monotonic()))
                if not ready:
                    late = ", ".join(str(asked.index(one)) for one in left)
                    raise TrainingError(f"rank {late} did not finish {method} within {_CALL:.0f} s")
                ray.get(ready)
            return list(ray.get(asked))
        except ray.exceptions.RayTaskError as error:
            rank = next(rank for rank, one in enumerate(asked) if _error_of(one) is not None)
            raise self._own_error(error, rank, method) from None
        except ray.exceptions.RayError:
            raise self._why_ended(asked, method) from None
        except BaseException:
            self.end()
            raise

    def _own_error(self, error: Any, rank: int, method: str) -> HpctrainError:
        """The error that a rank has raised: the only rank, or one whose argument could not be read."""
        self.end()
        cause = getattr(error, "cause", None)
        if isinstance(cause, HpctrainError):
            return cause
        where = self._seats[rank].node.address
        return TrainingError(f"rank {rank} on {where} failed in {method}: {type(cause).__name__}: {first_line(error)}")

    def _why_ended(self, asked: Sequence[Any], method: str) -> HpctrainError:
        """The reason for the end of ranks' processes: those that end by themselves leave an exit code, others were lost."""
        import ray

        ray.wait(list(asked), num_returns=len(asked), timeout=_SETTLE)
        gone = [rank for rank, one in enumerate(asked) if _error_of(one) is not None]
        endings = self._endings(gone)
        self.end()
        lost = [f"rank {rank} on {self._seats[rank].node.address}" for rank in gone if endings[rank].code is None]
        if lost:
            why = "killed, out of memory, or its node left the cluster"
            return LostRankError(f"{', '.join(lost)} was lost in {method}: {why}")
        for ending in endings.values():
            if ending.error:
                return error_of(ending.code, ending.error)
        return TrainingError(f"the ranks ended in {method} and said nothing; look at the logs of the run")

    def _endings(self, ranks: Sequence[int]) -> dict[int, Ending]:
        """How the processes of these ranks have ended; nothing is known of those whose nodes are gone."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        look: Any = ray.remote(take_ending)
        asked = {}
        for rank in ranks:
            where = NodeAffinitySchedulingStrategy(self._seats[rank].node.id, soft=False)
            asked[rank] = look.options(num_cpus=0, scheduling_strategy=where).remote(self._directories[rank])
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ASK) if asked else None
        found = dict.fromkeys(ranks, Ending(None, ""))
        for rank, one in asked.items():
            with suppress(ray.exceptions.RayError, TimeoutError):
                found[rank] = ray.get(one, timeout=0)
        return found

    def first(self, method: str, *arguments: Any) -> Any:
        """The first rank's answer to what needs no loop. Raises TrainingError."""
        import ray

        try:
            return ray.get(getattr(self._seats[0].actor, method).remote(*arguments), timeout=_CALL)
        except ray.exceptions.RayActorError as error:
            self.end()
            raise LostRankError(f"rank 0 was lost in {method}: {first_line(error)}") from None
        except (ray.exceptions.RayError, TimeoutError) as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, HpctrainError):
                raise cause from None
            raise TrainingError(f"rank 0 failed in {method}: {first_line(error)}") from None

    def end(self) -> None:
        """End the ranks, and give their resources back."""
        import ray

        with suppress(ray.exceptions.RayError):
            asked = [one.actor.forget.remote() for one in self._seats]
            ray.wait(asked, num_returns=len(asked), timeout=_FORGET)
        end_actors([one.actor for one in self._seats])
        with suppress(ray.exceptions.RayError):
            self._placed.remove()


def _error_of(reference: Any) -> Exception | None:
    """The error that an answer is; None for another one, and while there is none."""
    import ray

    try:
        ray.get(reference, timeout=0)
    except ray.exceptions.GetTimeoutError:
        return None
    except ray.exceptions.RayError as error:
        return error
    return None
