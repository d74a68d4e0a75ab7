"""[job] time_limit: what is a time, and when the time is nearly over."""

from __future__ import annotations

import time

import pytest
from pydantic import ValidationError

from hpctrain.contracts.identity import Identity
from hpctrain.job.tables import JobTable
from hpctrain.training.deadline import Deadline, deadline_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("45s", 45),
        ("1h", 3600),
        ("1h30m", 5400),
        ("2d1s", 172801),
        ("1-00:00:30", 86430),
        ("10", 600),
        ("10:30", 630),
        ("1:00:00", 3600),
        ("2-3", 183600),
        ("0-1:30", 5400),
        (90, 90),
        (0.5, 0.5),
    ],
)
def test_times(text: object, seconds: float) -> None:
    assert JobTable(name="a", steps=1, time_limit=text).time_limit == seconds  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", " ", "soon", "1h 5x", "-3m", "30m1h", "0s", 0, -1])
def test_what_is_no_time(text: object) -> None:
    with pytest.raises(ValidationError, match="time_limit"):
        JobTable(name="a", steps=1, time_limit=text)  # type: ignore[arg-type]


def test_the_end_leaves_room_for_the_longest_new_turn_and_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    deadline = Deadline(1000.0, begin=1000.0)
    assert not deadline.turn()
    now[0] += 200.0  # the first step is compiled
    assert not deadline.turn()
    with deadline.aside():
        now[0] += 100.0  # an evaluation
        assert not deadline.leaves_no(30.0) and deadline.leaves_no(1000.0)
        deadline.save_begins()
        now[0] += 30.0
        deadline.saved()
    while not deadline.turn():
        now[0] += 10.0
    # a turn took 10 s and the save 30 s
    assert 1000.0 + 1000.0 - now[0] == pytest.approx(1.5 * 40.0 + 5.0, abs=10.0)


def test_without_a_limit_there_is_all_time() -> None:
    assert not Deadline(None, begin=0.0).turn()


def test_the_end_of_the_slurm_job_counts_on_rank_0() -> None:
    begin, end = time.monotonic(), {"SLURM_JOB_END_TIME": str(int(time.time()) + 3)}
    late = deadline_of(None, begin, Identity(), end)
    assert late.leaves_no(3.0) and not deadline_of(1000.0, begin, Identity(), {}).leaves_no(3.0)
    assert not deadline_of(None, begin, Identity(rank=1, size=2), end).leaves_no(3.0)
