"""An operation that an accelerator has begun and a lost rank never lets end; events and a data path that a test controls."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hpctrain_horovod.engine import team as teams
from hpctrain_horovod.engine.errors import HorovodInternalError
from hpctrain_horovod.engine.negotiation import Negotiation
from hpctrain_horovod.engine.request import ALLREDUCE, Request
from hpctrain_horovod.engine.settings import EngineSettings
from hpctrain_horovod.engine.submission import Submission
from hpctrain_horovod.engine.team import Team
from hpctrain_horovod.engine.timeline import Timeline

from hpctrain.base.side_stream import Done

REQUEST = Request(ALLREDUCE, "gradient", "float32", (3,), "Sum", device="stand-in")


class Event:
    """A point that an accelerator reaches when `reach` is called."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.reach = self._reached.set

    def query(self) -> bool:
        return self._reached.is_set()


class HangingDevice:
    """Launches every operation at once; it ends with the test's event."""

    def __init__(self, event: Event) -> None:
        self._over = Done(event)

    def submitted(self, submissions: Sequence[Submission]) -> None:
        """The inputs are there."""

    def launch(self, kind: str, mine: Sequence[Submission | None], run: Callable[[], list[Any]]) -> Any:
        return run(), self._over

    def is_over(self) -> bool:
        return self._over.is_over()


class OneRank:
    rank, size = 0, 1

    def send(self, rank: int, message: bytes) -> None:
        raise AssertionError("there is no other rank")

    def flush(self, rank: int) -> None:
        """Nothing was sent."""

    def receive(self) -> None:
        return None


class Lane:
    """The data path: a test looks whether it was aborted, at which the device ends what it runs."""

    rank, size = 0, 1

    def __init__(self, event: Event) -> None:
        self.aborted, self._event = False, event

    def all_reduce(self, buffer: torch.Tensor, op: str) -> None:
        """The result comes late."""

    def abort(self) -> None:
        self.aborted = True
        self._event.reach()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(teams, "_CUT_AFTER", 0.3)
    monkeypatch.setattr(Done, "before_computing", lambda self, tensors=(): None)
    event, negotiation = Event(), Negotiation(OneRank(), 4)
    lane = Lane(event)
    monkeypatch.setattr(teams, "Beside", lambda: HangingDevice(event))
    settings = EngineSettings()
    team = Team([0], negotiation, lambda kind: lane, dist.HashStore(), settings, Timeline("MPI"), may_lose_ranks=True)
    yield team, negotiation, lane, event
    event.reach()
    team.end("the test is over", 5.0)


def test_the_wait_ends_with_an_error_when_a_rank_is_lost(parts: Any) -> None:
    team, negotiation, lane, _ = parts
    submission = Submission(REQUEST, -1, torch.ones(3))
    team.submit([submission], waits=True)
    threading.Timer(0.5, negotiation.end, ["rank 1 is lost"]).start()
    begin = time.monotonic()
    team.wait(submission)
    assert time.monotonic() - begin >= 0.5 and lane.aborted
    assert isinstance(submission.error, HorovodInternalError) and str(submission.error) == "rank 1 is lost"
    with pytest.raises(HorovodInternalError, match="rank 1 is lost"):
        team.submit([Submission(REQUEST, -1, torch.ones(3))], waits=True)


def test_what_still_runs_when_a_rank_has_ended_in_order_comes_to_its_end(parts: Any) -> None:
    team, negotiation, lane, event = parts
    submission = Submission(REQUEST, -1, torch.ones(3))
    team.submit([submission], waits=True)
    threading.Timer(0.1, negotiation.end, ["rank 1 has ended"]).start()
    threading.Timer(0.2, event.reach).start()
    team.wait(submission)
    time.sleep(0.3)
    assert submission.error is None and not lane.aborted
