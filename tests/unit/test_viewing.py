"""Readers of a run's directory: rows followed as they come, in bounded memory; runs that are found; frames of any size."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from hpctrain_tools.runs.following import Follower
from hpctrain_tools.runs.frame import frame
from hpctrain_tools.runs.history import History
from hpctrain_tools.runs.listing import list_runs
from hpctrain_tools.runs.room import Room
from hpctrain_tools.runs.rows import Evaluation, Step, is_evaluation, read_row
from hpctrain_tools.runs.sparkline import Series, chart, sparkline
from hpctrain_tools.runs.table import table
from hpctrain_tools.runs.watcher import Snapshot, Watcher
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from hpctrain.base.safe_files import replacing
from hpctrain.cli import execute

NEW_KEYS = {
    "seconds": {
        "data": 0.1, "forward": 0.2, "backward": 0.4, "communication": 0.05, "optimizer": 0.1, "checkpoint": 0.05,
        "evaluation": 0.0, "other": 0.1,
    },
    "mfu": 0.412, "goodput": 0.913,
    "model_flops_per_second": 3.12e14,
    "straggler": {"rank": 5, "node": "node2", "cause": "data", "excess_seconds": 0.31},
}  # fmt: skip


def row(step: int, **more: Any) -> dict[str, Any]:
    return {
        "step": step, "epoch": step / 100, "time": 1.8e9 + step, "loss": 5 / step, "lr": 0.01, "grad_norm": 1.5, "tokens": 96,
        "step_seconds": 1.0, "tokens_per_second": 96.0,
        "memory_bytes": {"rank_max": 3 * 2**30, "rank_mean": 2 * 2**30}, **more,
    }  # fmt: skip


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "epoch": step / 100, "time": 1.8e9, "evaluation_loss": loss, "evaluation_tokens": 100}


def made(directory: Path, *rows: dict[str, Any], steps: int = 100) -> Path:
    """The directory of a run with these rows."""
    directory.mkdir(parents=True)
    (directory / "job.resolved.toml").write_text(f'[job]\nname = "{directory.name}"\nsteps = {steps}\n')
    (directory / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return directory


PART = 64
"""Bytes of a part in these tests, so that many parts are read."""
LINES = st.one_of(*(st.binary(min_size=least, max_size=most) for least, most in ((0, 9), (55, 70), (120, 200)))).map(
    lambda line: line.replace(b"\n", b" ")
)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(LINES, max_size=6).map(lambda lines: b"".join(line + b"\n" for line in lines))),
        st.tuples(st.just("append"), LINES),  # the beginning of a line, or more of it
        st.tuples(st.just("replace"), st.integers(0, 200)),  # so many bytes of the old file, as a resume or a crash leaves them
        st.tuples(st.just("write over"), st.integers(0, 9)),
        st.just(("change the first byte", 0)),
        st.tuples(st.just("look"), st.integers(1, 5)),
        st.just(("remove", 0)),
    ),
    max_size=40,
)  # fmt: skip


@given(CHANGES)
def test_each_line_is_read_once_however_the_file_grows_or_is_replaced(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[str, Any]]
) -> None:
    path = tmp_path_factory.mktemp("followed") / "metrics.jsonl"
    follower, read, old = Follower(path, PART), list[bytes](), list[IO[bytes]]()

    def look() -> int:
        nonlocal read
        part = follower.look()
        assert sum(map(len, part.lines)) <= PART
        read = [*([] if part.anew else read), *part.lines]
        return part.left

    path.write_bytes(b"first\n" + b"".join(b"begin %d\n" % line for line in range(10)))
    look()
    look()
    for number, (change, what) in enumerate(changes):
        if change == "append":
            with path.open("ab") as file:
                file.write(what)
        elif change == "write over":
            path.write_bytes(b"row %d\n" % number * 10 * what)  # as rows have times, no two files are alike
        elif change in ("replace", "change the first byte") and path.exists():
            old.append(path.open("rb"))  # the system gives its number to no other file
            content = old[-1].read()
            with replacing(path) as new:
                new.write(content[:what] if change == "replace" else b"%d" % (number % 10) + content[1:])
        elif change == "remove" and path.exists():
            old.append(path.open("rb"))
            path.unlink()
        elif change == "look":
            for _ in range(what):
                look()
    for _ in range(10_000):
        if not look():
            break
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    assert read == [line for line in whole if len(line) < PART]
    assert follower.look().lines == ()
    for file in old:
        file.close()


def test_a_large_file_is_read_in_parts_and_then_only_what_is_new(tmp_path: Path) -> None:
    path, rows = tmp_path / "metrics.jsonl", 66_000
    text = json.dumps(row(1)).replace('"step": 1,', '"step": STEP,').replace('"loss": 5.0', '"loss": LOSS') + "\n"
    with path.open("w") as file:
        for step in range(1, rows + 1):
            file.write(text.replace("STEP", str(step)).replace("LOSS", str(5 / step)))
            if step % 1000 == 0:
                file.write(json.dumps(evaluation(step, abs(step - 40_000) + 1.0)) + "\n")
    size = path.stat().st_size
    history = History(path)
    tracemalloc.start()
    history.read()
    while history.unread:
        history.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 15e6 and peak < 9 * 2**20, (size, peak)
    assert (
        history.step is not None and history.step.step == rows and history.best.words() == ["best 1.0000 (step 40000)"]
    )
    cells = history.losses.cells(10)
    assert len(cells) == 10 and cells == sorted(cells, reverse=True)
    begin = read_bytes_of_process()
    with path.open("a") as file:
        file.write(json.dumps(row(rows + 1)) + "\n")
    history.read()
    assert history.step.step == rows + 1
    assert read_bytes_of_process() - begin < 20_000


def read_bytes_of_process() -> int:
    """Bytes that this process has read with system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_rows_have_types_whatever_a_file_holds() -> None:
    found = read_row(json.dumps(row(7, **NEW_KEYS)).encode())
    assert isinstance(found, Step) and found.step == 7 and found.mfu == 0.412 and found.flops == 3.12e14
    assert list(found.parts) == list(NEW_KEYS["seconds"])
    assert found.slowest == "slowest rank 5 on node2: data +0.31 s"
    measured = read_row(b'{"step": 3, "evaluation_loss": null, "evaluation_accuracy": 1, "evaluation_samples": 5}')
    assert measured == Evaluation(3, {"loss": None, "accuracy": 1.0})
    strange = {"step": 1, "loss": "x", "lr": 10**400, "memory_bytes": [1], "straggler": {"rank": "0"}, "skipped": 1}
    plain = read_row(json.dumps(strange).encode())
    assert plain == Step(1)
    hostile = read_row(json.dumps({"step": 1, "straggler": {"rank": 1, "node": "a\x1b[2J", "cause": 7}}).encode())
    assert isinstance(hostile, Step) and hostile.slowest == r"slowest rank 1 on a\x1b[2J"
    for line in (
        b"",
        b"[1]",
        b"{",
        b'{"step": -1}',
        b'{"step": true}',
        b"[" * 10_000,
        b'{"step": %d}' % 10**30,
        b"\xff",
    ):
        assert read_row(line) is None, line[:40]


def test_a_step_stays_one_whatever_a_hook_calls_its_keys(tmp_path: Path) -> None:
    line = json.dumps(row(7, evaluation_gap=0.1)).encode()
    found = read_row(line)
    assert isinstance(found, Step) and found.step == 7 and not is_evaluation(line)
    directory = made(tmp_path / "run", *(row(step, evaluation_gap=0.1) for step in range(1, 51)), evaluation(40, 2.5))
    seen = Watcher(directory).look().history
    assert seen.step is not None and seen.step.step == 50 and seen.evaluation == Evaluation(40, {"loss": 2.5})
    (listed,) = list_runs(directory, ()).runs
    assert listed.step is not None and listed.step.step == 50 and listed.evaluation == Evaluation(40, {"loss": 2.5})


@given(st.lists(st.floats() | st.none(), max_size=300), st.integers(1, 20))
def test_a_curve_has_bounded_points_and_a_mark_for_each_cell(values: list[float | None], width: int) -> None:
    series = Series(32)
    for at, value in enumerate(values):
        series.add(at, value)
    assert len(series) <= 33
    cells = series.cells(width)
    assert len(cells) == min(width, len(series))
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if (total := sum(map(abs, finite))) < 1e300:
        least, most = min(finite, default=0) - 1e-9 * total, max(finite, default=0) + 1e-9 * total
        assert all(math.isnan(cell) or least <= cell <= most for cell in cells)
    for ascii_only, marks in ((False, "▁▂▃▄▅▆▇█x"), (True, ".:#x")):
        assert set(sparkline(cells, ascii_only)) <= set(marks)
        assert [len(line) for line in chart(cells, 3, ascii_only)] == [len(cells)] * 3


def test_the_scale_of_a_curve_is_not_that_of_its_beginning() -> None:
    assert sparkline([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]) == "▁▂▃▄▅▆▇█"
    assert sparkline([100.0, *([2.0, 1.0] * 5)]) == "█" + "█▁" * 5
    assert sparkline([1.0, math.nan, 1.0]) == "▁x▁"
    assert list(chart([1.0, 2.0, 3.0], 2)) == [" ▁█", "▁██"]


@pytest.fixture
def seen(tmp_path: Path) -> Snapshot:
    """A run with all keys, four checkpoints' steps behind, and a log."""
    rows = [one for step in range(1, 51) for one in (row(step, **NEW_KEYS), *([evaluation(step, 3.5)] * (step == 40)))]
    directory = made(tmp_path / "a-run", *rows)
    (directory / "checkpoints" / "step-00000040").mkdir(parents=True)
    (directory / "log").mkdir()
    lines = [
        f"2026-01-02 03:04:05,678+0100 INFO {text}"
        for text in ("rank 0 of 8 on node1 (mpi)", "step 50/100  loss 1", "a word")
    ]
    (directory / "log" / "rank-00000.log").write_text("\n".join([*lines, "    more of it", "torn"]))
    (directory / "submissions.jsonl").write_text('{"target": "slurm", "id": "17"}\n')
    (directory / "lock").write_text("process 12 on node1\n")
    os.utime(directory / "submissions.jsonl", (1, 1))
    return Watcher(directory).look()


def test_a_frame_has_every_figure(seen: Snapshot) -> None:
    text = "\n".join(line.plain for line in frame([seen], Room(10_000), None))
    for said in (
        "a-run  running  (wrote 0 s ago)  slurm job 17  wrote 0 s ago", "step 50/100", "50%  ETA 0:50", "loss 0.1000",
        "evaluation 3.5000 (step 40)  best 3.5000 (step 40)", "96 tokens/s  1 s a step  mfu 41.2%  goodput 91%  312 TFLOP/s",
        "time: backward 40%  forward 20%  data 10%  optimizer 10%  other 10%  communication 5%  checkpoint 5%",
        "slowest rank 5 on node2: data +0.31 s", "lr 0.01  grad norm 1.5  epoch 0.50", "memory max 3.00 GiB, mean 2.00 GiB",
        "checkpoint step-00000040  10 steps ago", "03:04:05 a word\n    more of it",
    ):  # fmt: skip
        assert said in text, (said, text)
    assert "torn" not in text and text.count("loss ") == 1


@given(columns=st.integers(1, 220), height=st.integers(1, 60), runs=st.integers(1, 5), ascii_only=st.booleans())
def test_a_frame_fits_any_terminal(
    tmp_path_factory: pytest.TempPathFactory, columns: int, height: int, runs: int, ascii_only: bool
) -> None:
    seen = FRAMES.setdefault("seen", make_seen(tmp_path_factory))
    lines = frame([seen] * runs, Room(columns, ascii_only), height, "q ends the view")
    assert len(lines) <= height
    if columns >= 20:
        assert all(cell_len(line.plain) <= columns for line in lines), [line.plain for line in lines]
    if columns >= 40:
        assert lines[0].plain.startswith(("…", "...", "/")) or height < runs
    if columns >= 40 and height >= 2 * runs:
        assert [line.plain[:5] for line in lines].count("step ") == runs
    assert not ascii_only or all(line.plain.isascii() for line in lines)


FRAMES: dict[str, Snapshot] = {}


def make_seen(factory: pytest.TempPathFactory) -> Snapshot:
    if "seen" in FRAMES:
        return FRAMES["seen"]
    rows = [row(step, **NEW_KEYS) for step in range(1, 51)]
    return Watcher(made(factory.mktemp("frames") / "a-run-with-a-long-name", *rows)).look()


NUMBERS = st.floats() | st.integers() | st.integers(10**300, 10**310)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rank", "node", "cause", "excess_seconds", "rank_max"]), inner, max_size=4)
    ),
    max_leaves=5,
)
KEYS = st.sampled_from(
    [*row(1, **NEW_KEYS), "evaluation_loss", "evaluation_\x1b", "skipped", "skipped_steps", "rollbacks"]
)
ROWS = st.fixed_dictionaries({"step": st.integers(0, 2**63 - 1) | ANYTHING}).flatmap(
    lambda begin: st.dictionaries(KEYS, NUMBERS | ANYTHING).map(lambda more: {**more, **begin})
)


@pytest.mark.thorough
@given(
    rows=st.lists(ROWS, max_size=6), job=st.sampled_from(["steps = 9", "epochs = 1e308", "epochs = 1", "steps = true"])
)
def test_no_row_breaks_the_view(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], job: str) -> None:
    directory = made(tmp_path_factory.mktemp("rows") / "run", *rows)
    (directory / "job.resolved.toml").write_text(f"[job]\n{job}\n")
    seen = Watcher(directory).look()
    for width, height in ((60, 20), (10_000, None)):
        assert all(line.plain.isprintable() for line in frame([seen], Room(width), height))
    (listed,) = list_runs(directory, ()).runs
    assert all(line.plain.isprintable() for line in table([listed], 80))
    json.loads(json.dumps(listed.as_json()))


def test_a_resume_and_its_fewer_rows_are_followed(tmp_path: Path) -> None:
    directory = made(tmp_path / "run", *(row(step) for step in range(1, 60)), evaluation(50, 1.0))
    watcher = Watcher(directory)
    assert (first := watcher.look().history.step) is not None and first.step == 59
    with replacing(directory / "metrics.jsonl") as file:
        file.writelines(json.dumps(row(step)).encode() + b"\n" for step in range(1, 41))
    again = watcher.look()
    assert again.history.step is not None and again.history.step.step == 40
    assert again.history.evaluation is None and again.history.best.words() == []
    (directory / "metrics.jsonl").unlink()
    assert watcher.look().history.step is None


SAID: dict[str, tuple[Callable[[Path], object], str]] = {
    "before the first step": (lambda run: (run / "metrics.jsonl").write_text(""), "waiting for the first step"),
    "without a file of rows": (lambda run: (run / "metrics.jsonl").unlink(), "waiting for the first step"),
    "with a pipe for rows": (
        lambda run: ((run / "metrics.jsonl").unlink(), os.mkfifo(run / "metrics.jsonl")), "waiting for the first step",
    ),
    "with a loss that is not finite": (
        lambda run: (run / "metrics.jsonl").write_text(json.dumps(row(2) | {"loss": None, "skipped": True}) + "\n"),
        "loss not finite",
    ),
    "that hangs": (lambda run: [os.utime(path, (1e9, 1e9)) for path in run.iterdir()], "ask its ranks: hpctrain where"),
    "with a job that is no TOML": (lambda run: (run / "job.resolved.toml").write_text("["), "step 50"),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID)
def test_the_view_of_a_run(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hpctrain_tools.runs import watcher
    from hpctrain_tools.runs.standing import Standing

    change, said = SAID[case]
    directory = made(tmp_path / "run", *(row(step) for step in range(1, 51)))
    change(directory)
    snapshot = replace(watcher.Watcher(directory).look(), standing=Standing("running"))
    text = "\n".join(line.plain for line in frame([snapshot], Room(120), 20))
    assert said in text, text


def test_runs_are_found_but_not_in_checkpoints_behind_links_or_too_deep(tmp_path: Path) -> None:
    made(tmp_path / "a", row(3), evaluation(3, 1.5))
    made(tmp_path / "sweep" / "lr=0.1", row(100))
    made(tmp_path / "sweep" / "lr=0.2", {"step": 1, "time": "x"})
    made(tmp_path / "a" / "variant", row(1))
    made(tmp_path / "a" / "variant" / "mlflow" / "deep")
    made(tmp_path / "a" / "checkpoints" / "copied")
    made(tmp_path / "1" / "2" / "3" / "4" / "5" / "6" / "7")
    (tmp_path / "sweep" / "submissions.jsonl").write_text('{"target": "slurm", "runs": ["lr=0.1", "lr=0.2"]}\n')
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "1" / "loop").symlink_to(tmp_path)
    listing = list_runs(tmp_path, ())
    found = {str(one.directory.relative_to(tmp_path)): one for one in listing.runs}
    assert found.keys() == {"a", "a/variant", "sweep/lr=0.1", "sweep/lr=0.2"} and listing.remarks == []
    assert found["a"].evaluation == Evaluation(3, {"loss": 1.5}) and found["a"].standing.word == "stopped"
    assert found["sweep/lr=0.1"].standing.word == "done"


def test_the_newest_run_is_first_and_a_large_one_is_read_from_its_end(tmp_path: Path) -> None:
    for number in range(3):
        directory = made(tmp_path / f"{number}", evaluation(1, 9.0), *(row(step) for step in range(1, 5000)))
        for path in directory.iterdir():
            os.utime(path, (1e9 + number, 1e9 + number))
    begin = read_bytes_of_process()
    runs = list_runs(tmp_path, ()).runs
    assert read_bytes_of_process() - begin < 3 * 2**19 + 100_000
    assert [one.directory.name for one in runs] == ["2", "1", "0"]
    assert all(one.step is not None and one.step.step == 4999 and one.evaluation is None for one in runs)


def test_a_table_leaves_out_what_has_no_room(tmp_path: Path) -> None:
    made(tmp_path / "a-run-with-a-long-name", row(50), evaluation(50, 1.5))
    runs = list_runs(tmp_path, ()).runs
    head, whole = (line.plain for line in table(runs, None))
    assert whole.split() == [str(runs[0].directory), "stopped", "50/100", "0.1000", "1.5000", "0", "s", "ago", "-", "-"]
    titles = head.split()
    for width in range(22, len(head) + 10):
        shown, line = (line.plain for line in table(runs, width))
        assert cell_len(line) <= width and cell_len(shown) <= width, (width, line)
        left = [title for title in titles if title not in shown.split()]
        dropped = ["CHECKPOINT", "JOB", "EVALUATION", "WROTE", "LOSS", "STEP"]
        assert sorted(left) == sorted(dropped[: len(left)]) and line.split()[0].endswith("long-name"[-7:]), (
            width,
            shown,
        )
    assert not left


SCHEDULER = """
import json
from pathlib import Path
from hpctrain.api import JobState, Options, Scheduler, hookimpl

class Counting(Scheduler):
    name = "counting"
    Options = Options

    def render(self, launch): return ""
    def submit(self, script, launch): return ["1"]
    def cancel(self, id, directory): pass
    def state(self, id):
        with open("asked", "a") as file: print(id, file=file)
        return JobState({"1": "pending", "2": "failed"}.get(id, "unknown"))

class AllAtOnce(Counting):
    name = "all"
    def states(self, ids):
        with open("asked", "a") as file: print(*ids, file=file)
        return {id: JobState("running", "on node1") for id in ids if id != "9"}

@hookimpl
def hpctrain_scheduler(): return [Counting, AllAtOnce]
"""


@pytest.mark.parametrize("target", ["counting", "all", "nowhere"])
def test_schedulers_are_asked_about_the_runs_that_may_still_run(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("counting.py").write_text(SCHEDULER)
    for id, rows in (("1", ()), ("2", (row(7),)), ("3", (row(100),)), ("9", ())):
        directory = made(Path("runs", id), *rows)
        (directory / "job.resolved.toml").rename(directory / "job.submitted.toml")
        (directory / "submissions.jsonl").write_text(json.dumps({"target": target, "id": id}) + "\n")
    assert execute(["runs", "--json", "--load", "counting"]) == 0
    told = capsys.readouterr()
    states = {one["job"]["id"]: (one["state"], one["detail"]) for one in json.loads(told.out)}
    asked = Path("asked").read_text().splitlines() if target != "nowhere" else []
    forgotten = ("unknown", "its scheduler has forgotten the job")
    if target == "counting":
        assert sorted(asked) == ["1", "2", "9"] and states["1"] == ("pending", "") and states["2"] == ("failed", "")
        assert states["9"] == forgotten
    elif target == "all":
        assert [sorted(line.split()) for line in asked] == [["1", "2", "9"]]
        assert states["1"] == states["2"] == ("running", "on node1") and states["9"] == forgotten
    else:
        assert "nowhere cannot be asked about 3 jobs: no installed plugin provides the scheduler 'nowhere'" in told.err
        assert states["1"] == ("unknown", "its scheduler has not told"), states
    assert states["3"] == ("done", "")
