"""Requests for a window of steps: from the command over files to the ranks, and their answers."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hpctrain_tools.commands.profile import command
from hpctrain_tools.profile import asking
from hpctrain_tools.profile.asking import record_now
from hpctrain_tools.profile.table import Figures
from hpctrain_tools.profile.traces import stored_window
from hpctrain_tools.runs.asking import asked
from jobs import TINY

import hpctrain
from hpctrain.base.errors import UsageError
from hpctrain.ranks.watchdog import queries
from hpctrain.ranks.watchdog.queries import Queries


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queries]:
    monkeypatch.setattr(queries, "_LOOK", 0.02)
    found = Queries(tmp_path)
    found.start()
    yield found
    found.close("the test ends")


def test_a_request_is_taken_once_and_answered_to_its_end(answering: Queries, tmp_path: Path) -> None:
    with asked(tmp_path, "profile", {"record": 2}) as terminal:
        answers = terminal.answers(30)
        while not answering.has_request:
            pass
        answering.acknowledge("step 3, forward")
        assert next(answers) == {"state": "waiting", "where": "step 3, forward"}
        question = answering.take()
        assert question is not None and (question.name, question.values) == ("profile", {"record": 2})
        assert answering.take() is None and not answering.has_request and not answering.is_waiting
        for number in range(20):
            answering.tell(question, {"state": "gathering", "come": number})
        answering.tell(question, {"state": "done"})
        answering.close("the job ends")
        newest = list(iter(lambda: next(answers), {"state": "done"}))
        assert all(one["state"] == "gathering" for one in newest)
    assert not list(tmp_path.iterdir())
    answering.tell(question, {"state": "done"})
    answering.close("")
    assert not list(tmp_path.iterdir()), "nobody waits for it"


def test_a_request_is_withdrawn_or_refused(answering: Queries, tmp_path: Path) -> None:
    with asked(tmp_path, "profile", {}):
        while not answering.has_request:
            pass
    while answering.has_request:
        pass
    assert answering.take() is None
    with asked(tmp_path, "profile", {}) as terminal:
        while not answering.has_request:
            pass
        answering.close("the job ends after step 9")
        assert next(terminal.answers(30)) == {"state": "refused", "why": "the job ends after step 9"}
    with (
        pytest.raises(UsageError, match="expected the directory of a running job"),
        asked(tmp_path / "no", "profile", {}),
    ):
        pass


def test_a_request_that_is_taken_meanwhile_does_not_wait(answering: Queries, tmp_path: Path) -> None:
    """The ranks take it while the watchdog is about to tell that it waits."""
    with asked(tmp_path, "profile", {}) as terminal:
        while not answering.has_request:
            pass
        lock = answering._lock

        class Taking:
            def __enter__(self) -> None:
                answering._lock = lock
                question = answering.take()
                assert question is not None
                answering.tell(question, {"state": "taken"})
                lock.acquire()

            def __exit__(self, *_: object) -> None:
                lock.release()

        answering._lock = Taking()  # type: ignore[assignment]
        answering.acknowledge("step 3, forward")
        answering.close("")  # every answer is written
        assert next(terminal.answers(30)) == {"state": "taken"}


@pytest.mark.parametrize("state", ["gathering", "done"])
def test_answers_that_replaced_others_are_enough(
    state: str, answering: Queries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal looks ten times a second, and so may never see that its request was taken."""
    monkeypatch.setattr(asking, "_WHERE", 0.1)

    def take() -> None:
        while not answering.has_request:
            pass
        question = answering.take()
        assert question is not None
        told = {"first": 3, "last": 5, "ranks": [0, 1]}
        answering.tell(question, {"state": state, "come": [0], "window": "step-00000003", "missing": {}, **told})

    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(take)
        if state == "done":
            assert record_now(tmp_path, {}, 20, 20) == ("step-00000003", 0)
        else:
            with pytest.raises(UsageError, match=r"the traces of rank 1 have not come within 0\.2 s"):
                record_now(tmp_path, {}, 20, 0.2)
        taken.result(20)


TRAINS_ON = """
from pathlib import Path

from hpctrain.api import hookimpl


@hookimpl
def hpctrain_step_end(step, control):
    if Path("enough").exists():
        control.stop("nobody asks any more")
"""


def beside_training(ask: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The result of `ask` on a thread beside a run, which trains until then."""
    monkeypatch.setattr(queries, "_LOOK", 0.02)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    Path("trains_on.py").write_text(TRAINS_ON)

    def asking() -> Any:
        try:
            give_up = time.monotonic() + 60
            while not Path("out/metrics.jsonl").exists() and time.monotonic() < give_up:
                time.sleep(0.01)
            return ask()
        finally:
            Path("enough").touch()

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(asking)
        hpctrain.run({**TINY, "job": {**TINY["job"], "steps": 10**6}, "plugins": {"load": ["trains_on"]}})
        return found.result(60)


@pytest.mark.thorough
def test_every_answer_tells_what_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The second window has no trace, since no rank has a directory for one."""

    def ask() -> tuple[list[dict[str, Any]], int]:
        found = []
        with asked(Path("out"), "profile", {"record": 2}) as terminal:
            for one in terminal.answers(60):
                found.append(one)
                if one["state"] in ("done", "refused"):
                    break
        with monkeypatch.context() as here:
            here.setattr(tempfile, "tempdir", "nowhere")
            return found, command.main(["out", "--now", "--json"], standalone_mode=False)

    answers, code = beside_training(ask, tmp_path, monkeypatch)
    window = json.loads((Path("out/profile") / answers[-1]["window"] / "window.json").read_text())
    for one in answers:
        if one["state"] != "waiting":
            assert (one["first"], one["last"], one["ranks"]) == (window["first"], window["last"], [0])
    assert code == 4 and "missing      rank 0: its trace could not be written" in capfd.readouterr().err
    with pytest.raises(
        UsageError, match="found no trace, expected that of a rank at least; rank 0: its trace could not"
    ):
        Figures(stored_window(Path("out"), None), [])


@pytest.mark.parametrize(
    ("words", "values"), [((), {}), (("--ranks", "1,0"), {"ranks": [0, 1]}), (("--ranks", "all"), {"ranks": "all"})]
)
def test_a_request_has_what_was_typed(
    words: Sequence[str], values: dict[str, Any], answering: Queries, tmp_path: Path
) -> None:
    """The job's own values hold for the rest."""
    with ThreadPoolExecutor(1) as pool:
        typed = ["show", str(tmp_path), "--now", "--memory", *words]
        done = pool.submit(command.main, typed, standalone_mode=False)
        while not answering.has_request:
            pass
        question = answering.take()
        assert question is not None and question.values == {"record": 3, "warmup": 1, "memory": True, **values}
        answering.tell(question, {"state": "refused", "why": "that is enough"})
        with pytest.raises(UsageError, match="the job does not record: that is enough"):
            done.result(20)


def test_options_of_a_request_are_refused_without_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="found --record, --memory without --now"):
        command.main([str(tmp_path), "--record", "5", "--memory"], standalone_mode=False)
    with pytest.raises(UsageError, match="found none, expected a window of steps"):
        command.main([str(tmp_path), "--ranks", "all"], standalone_mode=False)
