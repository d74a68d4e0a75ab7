"""The agreement of many ranks, simulated in one process: any order of submissions, any delays, trees of several levels."""

from __future__ import annotations

import queue
import random
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hpctrain_horovod.engine.links import FAN_OUT, Longhand, Shorthand, children_of, parent_of
from hpctrain_horovod.engine.negotiation import Agreed, Negotiation
from hpctrain_horovod.engine.request import JOIN, Request
from hpctrain_horovod.engine.settings import EngineSettings
from hypothesis import given, settings
from hypothesis import strategies as st


class Post:
    """Messages between simulated ranks; they arrive in the order of each sender, at any time."""

    def __init__(self, size: int, draw: random.Random) -> None:
        self.boxes: list[dict[int, deque[bytes]]] = [{} for _ in range(size)]
        self.draw, self.size, self.sent = draw, size, 0


class SimulatedLinks:
    def __init__(self, post: Post, rank: int) -> None:
        self.rank, self.size, self._post = rank, post.size, post

    def send(self, rank: int, message: bytes) -> None:
        self._post.boxes[rank].setdefault(self.rank, deque()).append(message)
        self._post.sent += len(message)

    def flush(self, rank: int) -> None:
        """Nothing is held back."""

    def receive(self) -> tuple[int, bytes] | None:
        waiting = [source for source, box in self._post.boxes[self.rank].items() if box]
        if not waiting or self._post.draw.random() < 0.3:  # still on its way
            return None
        source = self._post.draw.choice(waiting)
        return source, self._post.boxes[self.rank][source].popleft()


def simulate(
    size: int, plans: list[list[tuple[Request, int, Any]]], seed: int, capacity: int = 4
) -> tuple[list[list[Agreed]], int]:
    """What each rank was told to run, in order, and the bytes sent. plans: each rank's submissions, in its own order."""
    draw = random.Random(seed)
    post = Post(size, draw)
    ranks = [Negotiation(SimulatedLinks(post, rank), capacity) for rank in range(size)]
    left = [deque(plan) for plan in plans]
    ran: list[list[Agreed]] = [[] for _ in range(size)]
    for _ in range(200_000):
        rank = draw.randrange(size)
        if left[rank] and draw.random() < 0.5:
            ranks[rank].submit(*left[rank].popleft())
        ran[rank] += ranks[rank].progress()
        quiet = not any(left) and not any(box for boxes in post.boxes for box in boxes.values())
        if quiet and all(not one.progress() for one in ranks):
            return ran, post.sent
    raise AssertionError("the ranks did not finish")


def keys(ran: list[Agreed]) -> list[Any]:
    return [one.key for one in ran]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 10**6), st.sampled_from([0, 1, 3, 1024]))
def test_all_ranks_run_everything_in_one_order(size: int, count: int, seed: int, capacity: int) -> None:
    draw = random.Random(seed)
    wanted = [(Request("allgather", f"t{n % 7}", "int64", (n % 3,)), n, None) for n in range(count)]
    plans = [
        [(request, number, rank * 100 + number) for request, number, _ in draw.sample(wanted, count)]
        for rank in range(size)
    ]
    ran, _ = simulate(size, plans, seed, capacity)
    assert all(keys(one) == keys(ran[0]) for one in ran)
    assert sorted(keys(ran[0])) == sorted((request.kind, request.name, number) for request, number, _ in wanted)
    for one in ran:
        for agreed in one:
            assert agreed.error is None
            assert agreed.values == {rank: rank * 100 + agreed.number for rank in range(size)}


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 50), st.integers(0, 10**6))
def test_one_rank_that_differs_is_an_error_everywhere(size: int, seed: int) -> None:
    draw = random.Random(seed)
    odd = draw.randrange(size)
    good, bad = Request("allreduce", "a", "float32", (3,)), Request("allreduce", "a", "float32", (4,))
    after = Request("allreduce", "b", "float32", (3,))
    plans: list[list[Any]] = [[(bad if rank == odd else good, -1, None), (after, -1, None)] for rank in range(size)]
    ran, _ = simulate(size, plans, seed)
    for one in ran:
        errors = {agreed.request.name: agreed.error for agreed in one}
        assert errors["b"] is None and "Mismatched ALLREDUCE tensor shapes" in str(errors["a"])
        assert f"rank {odd} has [4]" in str(errors["a"]) or "has [3]" in str(errors["a"])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 50), st.integers(0, 10**6))
def test_ranks_that_join_are_not_waited_for(size: int, seed: int) -> None:
    """Each rank submits its own number of allreduces, then joins; then all submit one more."""
    draw = random.Random(seed)
    counts = [draw.randrange(6) for _ in range(size)]
    plans: list[list[Any]] = [
        [(Request("allreduce", f"t{n}", "float32", (1,)), -1, None) for n in range(counts[rank])]
        + [(Request(JOIN), -1, rank)]
        for rank in range(size)
    ]
    ran, _ = simulate(size, plans, seed)
    for one in ran:
        assert all(agreed.error is None for agreed in one)
        names = [agreed.request.name for agreed in one if agreed.request.kind != JOIN]
        assert sorted(names) == [f"t{n}" for n in range(max(counts))] and one[-1].request.kind == JOIN
        assert one[-1].values[0][1] == size - 1, "the highest number of all"
    assert len({str(one[-1].values) for one in ran}) == 1


class Reluctant:
    """Links over queues. A message leaves the sender only while the receiver looks for messages, as MPI's may."""

    def __init__(
        self, boxes: list[queue.SimpleQueue[tuple[int, bytes, threading.Event]]], rank: int, late: float = 0.3
    ) -> None:
        """late: the share of looks at which a message is still on its way."""
        self.rank, self.size, self._boxes = rank, len(boxes), boxes
        self._sent: dict[int, threading.Event] = {}
        self._draw, self._late = random.Random(rank), late

    def send(self, rank: int, message: bytes) -> None:
        self._sent[rank] = threading.Event()
        self._boxes[rank].put((self.rank, message, self._sent[rank]))

    def flush(self, rank: int) -> None:
        if rank in self._sent and not self._sent[rank].wait(20):
            raise TimeoutError(f"rank {rank} does not look for messages of rank {self.rank}")

    def receive(self) -> tuple[int, bytes] | None:
        if self._draw.random() < self._late:
            return None
        with suppress(queue.Empty):
            source, message, left = self._boxes[self.rank].get_nowait()
            left.set()
            return source, message
        return None


@pytest.mark.cases(thorough=["18"], nightly=["35"])
@pytest.mark.parametrize("size", [2, 4, 18, 35])
def test_ranks_that_wait_for_each_other_in_an_operation_do_not_deadlock(size: int) -> None:
    """While a rank runs an operation, which ends when all ranks run it, it looks for no messages."""
    boxes: list[Any] = [queue.SimpleQueue() for _ in range(size)]
    meeting = threading.Barrier(size, timeout=20)
    orders: list[list[str]] = [[] for _ in range(size)]

    def take_part(rank: int) -> None:
        draw = random.Random(rank)
        one = Negotiation(Reluctant(boxes, rank), 4)
        left = [Request("allreduce", f"t{number}", "float32", (1,)) for number in range(30)]
        draw.shuffle(left)
        while len(orders[rank]) < 30 and not meeting.broken:
            if left and draw.random() < 0.5:
                one.submit(left.pop(), -1, None)
            for agreed in one.progress():
                orders[rank].append(agreed.request.name)
                meeting.wait()

    def take_part_or_end_all(rank: int) -> None:
        try:
            take_part(rank)
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(take_part_or_end_all, range(size)))
    assert orders == [orders[0]] * size


def test_nothing_is_agreed_on_after_the_end() -> None:
    """Rank 2 asks for an operation and ends; rank 1's request, sent before, arrives later."""
    boxes: list[Any] = [queue.SimpleQueue() for _ in range(3)]
    ranks = [Negotiation(Reluctant(boxes, rank, late=0.0), 4) for rank in range(3)]
    request = Request("allreduce", "x", "float32", (1,))
    for one in (ranks[0], ranks[2]):
        one.submit(request, -1, None)
    ranks[2].progress()
    ranks[2].end("rank 2 has ended")
    ranks[1].submit(request, -1, None)
    ranks[1].progress()
    assert [one.progress() for one in ranks * 2] == [[]] * 6
    assert [one.ended for one in ranks] == ["rank 2 has ended"] * 3


def test_the_end_reaches_every_rank() -> None:
    post = Post(40, random.Random(0))
    ranks = [Negotiation(SimulatedLinks(post, rank), 8) for rank in range(40)]
    ranks[37].end("rank 37 has ended")
    for _ in range(40):
        for one in ranks:
            one.progress()
    assert [one.ended for one in ranks] == ["rank 37 has ended"] * 40


@pytest.mark.parametrize("size", [1, 2, 17, 18, 300])
def test_the_tree_has_every_rank_once(size: int) -> None:
    for rank in range(size):
        for child in children_of(rank, size):
            assert parent_of(child) == rank
    assert sorted(child for rank in range(size) for child in children_of(rank, size)) == list(range(1, size))
    assert len(children_of(0, size)) == min(size - 1, FAN_OUT)


@settings(deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(0, 9), max_size=60))
def test_numbers_stand_for_requests(capacity: int, uses: list[int]) -> None:
    short, long = Shorthand(capacity), Longhand()
    for use in uses:
        request = Request("allreduce", f"t{use}", "float32", (use,))
        assert (
            long.resolve([list(part) if isinstance(part, Request) else part for part in short.refer(request)])
            == request
        )


def test_what_was_sent_before_is_sent_as_a_number() -> None:
    plan = [(Request("allreduce", f"layers.{n}.attention.weight", "float32", (512, 512)), -1, None) for n in range(50)]
    _, first = simulate(2, [plan, plan], 1, 1024)
    _, twice = simulate(2, [plan * 2] * 2, 1, 1024)
    assert twice - first < first / 4


@pytest.mark.parametrize(
    ("variable", "field", "value"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "fusion_bytes", 1000), ("HOROVOD_CACHE_CAPACITY", "cache_capacity", 0),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "stall_warning", 5.0), ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "stall_shutdown", 9.0),
        ("HOROVOD_TIMELINE", "timeline", "trace.json"), ("HOROVOD_DYNAMIC_PROCESS_SETS", "dynamic_process_sets", True),
    ],
)  # fmt: skip
def test_settings(variable: str, field: str, value: Any) -> None:
    found = EngineSettings.from_environment({variable: str(value)})
    assert getattr(found, field) == value and found != EngineSettings()
    assert EngineSettings.from_environment({}) == EngineSettings()


def test_settings_that_are_no_numbers() -> None:
    with pytest.raises(ValueError, match=r"HOROVOD_CACHE_CAPACITY='many', expected a number"):
        EngineSettings.from_environment({"HOROVOD_CACHE_CAPACITY": "many"})
    assert EngineSettings.from_environment({"HOROVOD_STALL_CHECK_DISABLE": "1"}).stall_warning == 0
    assert EngineSettings.from_environment({"HOROVOD_TIMELINE": "DYNAMIC"}).timeline is None
