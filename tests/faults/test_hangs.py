"""A rank that hangs is named, with its line, soon after the limit; then the job ends and leaves nothing running."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from hangs import LATE, LIMIT, PLANTED, Planted, environment, idle_seconds, tell, write_job
from launching import hpctrain, in_process, run, started, wait_until

OF_EVERY_RUN = {("mpi", "sleep"), ("gloo", "sleep")}
THOROUGH = {
    ("gloo", "sleep-alarm"),
    ("gloo", "stop"),
    ("mpi", "stop-first"),
    ("gloo", "worker"),
    ("mpi", "group"),
    ("mpi", "mismatch"),
}
"""hangs.py runs all."""


@pytest.mark.cases(rest="thorough")
@pytest.mark.parametrize(
    ("communicator", "planted"),
    [
        pytest.param(communicator, one, marks=[pytest.mark.nightly] * ((communicator, one.name) in THOROUGH))
        for communicator in ("mpi", "gloo")
        for one in PLANTED
        if (communicator, one.name) in OF_EVERY_RUN | THOROUGH
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_the_rank_that_hangs_is_named(communicator: str, planted: Planted, tmp_path: Path) -> None:
    code, output, _ = tell(planted, communicator, tmp_path)
    assert code == 4, output
    missing = [words for words in planted.told if words not in output]
    assert not missing, f"{missing} in {output}"
    limit = 20 if "watchdog.timeout_seconds=20" in planted.options else LIMIT
    assert idle_seconds(output) <= limit + LATE, output
    silent = {"stop": 1, "stop-first": 0}.get(planted.plant)
    for rank in range(3):
        log = (tmp_path / "out" / "log" / f"rank-{rank:05d}.log").read_text()
        assert rank == silent or "thread MainThread:" in log or planted.plant == "mismatch", log


@pytest.mark.nightly
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    write_job(tmp_path)
    words = hpctrain("run", "job.toml", "-n", "3")
    done = run(words, tmp_path, 60, environment("kill"))
    assert done.code == 4 and "rank 1 ended without an error message (SIGKILL)" in done.err, done


@pytest.mark.nightly
@pytest.mark.parametrize("failing", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_failing_rank_ends_ranks_that_do_not_notice(failing: int, tmp_path: Path) -> None:
    """Nobody else ends them where a launcher leaves the others alone, as `srun --kill-on-bad-exit=0` does."""
    write_job(tmp_path)
    words = hpctrain("run", "job.toml", "--set", "watchdog.timeout_seconds=600")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    common = {**environment(f"fails-{failing}"), "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    with ExitStack() as ranks:
        each = [
            ranks.enter_context(
                started(words, tmp_path, {**common, "MASTER_PORT": str(port), "RANK": rank, "LOCAL_RANK": rank})
            )
            for rank in "012"
        ]
        done = [one.finish(60) for one in each]
    assert [one.code for one in done] == [4, 4, 4], done
    assert "ValueError: planted" in done[failing].err, done[failing]
    told = [one.err for one in done if "rank 0 has ended" in one.err or "no heartbeat" in one.err]
    assert not told, told  # they were ended by an order, not by a limit of their own


@pytest.mark.nightly
def test_another_terminal_asks_where_a_job_stands(tmp_path: Path) -> None:
    write_job(tmp_path)
    asking = hpctrain("where", "out", "--timeout", "2")
    words = hpctrain("run", "job.toml", "-n", "2", "--set", "watchdog.timeout_seconds=60")
    with started(words, tmp_path, environment("sleep")):
        wait_until(lambda: (tmp_path / "out" / "metrics.jsonl").exists(), 60, "training")
        give_up = time.monotonic() + 40
        answer = run(asking, tmp_path)
        while "planted.py:" not in answer.out and time.monotonic() < give_up:
            answer = run(asking, tmp_path)
        assert answer.code == 0, answer
        assert "rank 1 on" in answer.out and "time.sleep(10_000)  # in a forward" in answer.out, answer
        assert "waiting: rank 0 on" in answer.out and "all_reduce(" in answer.out, answer
    left = [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith("where")]
    assert not left
    answer = run(asking, tmp_path)
    assert answer.code == 2 and "no job answered in out within 2 s" in answer.err, answer
    assert in_process("where", "nowhere", cwd=tmp_path).code == 2


@pytest.mark.nightly
def test_a_request_to_a_job_that_hangs_or_has_ended(tmp_path: Path) -> None:
    write_job(tmp_path)
    asking = hpctrain("profile", "out", "--now", "--timeout", "8")
    words = hpctrain("run", "job.toml", "-n", "2", "--set", "watchdog.timeout_seconds=100")
    with started(words, tmp_path, environment("sleep")):
        wait_until(lambda: (tmp_path / "out" / "metrics.jsonl").exists(), 60, "training")
        hanging = run(asking, tmp_path, 60)
    assert hanging.code == 2 and "the job runs, but ended no step within 8 s: rank 0 is in step 2" in hanging.err, (
        hanging
    )
    assert "rank 1 on" in hanging.err and "time.sleep(10_000)  # in a forward" in hanging.err, hanging
    left = [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith("profile.")]
    ended = run(asking, tmp_path, 60)
    assert not left and ended.code == 2 and "no job answered in out within 8 s; it has ended" in ended.err, ended
    nowhere = run(hpctrain("profile", "nowhere", "--now"), tmp_path)
    assert nowhere.code == 2 and "nowhere is no directory" in nowhere.err, nowhere
