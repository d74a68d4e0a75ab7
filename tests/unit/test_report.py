"""`hpctrain report` over planted runs: the verdict of each story, sums that add up, crafted files, a million rows."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hpctrain_tools import report as package
from hpctrain_tools.report.curves import RowReader
from hpctrain_tools.report.facts import Ending
from hpctrain_tools.report.gathering import gather
from hpctrain_tools.report.pages import html_page, markdown
from hpctrain_tools.report.verdict import judge
from hpctrain_tools.runs.run_directory import RunDirectory
from jobs import JobFile
from planted_runs import (
    BEGIN,
    COMPUTING,
    GB,
    Planted,
    communication_bound,
    data_bound,
    healthy,
    killed_and_resumed,
    memory_unused,
    not_finite,
    out_of_memory,
    pipeline_idle,
    straggling,
)
from torch import Tensor, nn

import hpctrain
from hpctrain.base.errors import TrainingError
from hpctrain.cli import execute
from hpctrain.job.output_lock import OutputLock
from hpctrain.job.table_types import SlotTable
from hpctrain.job.tables import Job

STORIES: list[tuple[Callable[[Path], Planted], str, str, str]] = [
    (healthy, r"Finished at step 200 of 200", r"nothing stands out: 92% of the steps' time computes, mfu 42", "hpctrain profile"),
    (data_bound, r"Finished", r"42% of each step waits for data", r"\[dataset\] workers = 4"),
    (communication_bound, r"Finished", r"47% of each step waits for communication, most of it for tp\.all_reduce",
     r"\[parallelism\.tensor\] size = 2, if the model fits"),
    (memory_unused, r"Finished", r"peak 31 of 80 GB", r"\[batch\] micro_size = 16, now 8"),
    (straggling, r"Finished", r"rank 5 on node2 is slow: its data takes 0\.31 s longer a step", r"\[dataset\] workers = 4; if"),
    (pipeline_idle, r"Finished", r"for 27% of each step, ranks of the pipeline .*; its schedule with 8 micro batches leaves 25%",
     r"\[batch\] micro_size = 4, now 8"),
    (out_of_memory, r"Out of memory in step 3 of 200, rank 3", r"rank 3 on node1 ran out of memory in step 3: asked for 2.00 GiB",
     r'\[activation_checkpointing\] mode = "full"'),
    (not_finite, r"Loss not finite \(NaN\) in step 58 of 200$", r"step 58: loss nan", r"clip_norm = 1.0; this changes"),
    (killed_and_resumed, r"Finished", r"22% of the time went into 90 lost steps", r"\[checkpoint\] every_steps = 20$"),
]  # fmt: skip


@pytest.mark.parametrize("story", STORIES, ids=lambda one: one[0].__name__)
def test_the_verdict_is_that_of_the_story(
    tmp_path: Path, story: tuple[Callable[[Path], Planted], str, str, str]
) -> None:
    plant, ended, limit, step = story
    found = judge(gather(plant(tmp_path / "run").long_ago().directory))
    assert re.match(ended, found.ended) and re.search(limit, found.first.limit), found
    assert re.search(step, found.first.step), found
    if plant not in (communication_bound, killed_and_resumed):
        assert len(found.findings) == 1, found


def test_each_step_to_try_names_a_key_of_the_job_file() -> None:
    sources = "".join(
        (Path(package.__file__).parent / name).read_text() for name in ("limits.py", "waits.py", "endings.py")
    )
    named = set(re.findall(r"\[([a-z_]+)\] ([a-z_]+)(?= = | larger| half| so )", sources))
    assert len(named) >= 12
    for table, key in named:
        found = Job.model_fields[table].annotation
        assert found is not None and (key in found.model_fields or issubclass(found, SlotTable)), (table, key)


def test_a_killed_run_is_told_so_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    planted = Planted(tmp_path / "run").starts().trains(50).saves().trains(20).long_ago()
    found = judge(gather(planted.directory))
    assert found.ended.startswith("Killed after step 70 of 200") and found.level == "bad", found
    assert "goes on from step 50" in found.first.step, found


@pytest.mark.parametrize(
    ("operation", "tables", "step"),
    [
        (
            "tp.all_reduce",
            {"parallelism": {"tensor": {"size": 16}}},
            "[parallelism.tensor] size = 8: the ranks of a node",
        ),
        ("pp.recv", {"parallelism": {"pipeline": {"size": 4}}}, "[parallelism.pipeline] size = 2"),
        ("cp.send", {"parallelism": {"context": {"size": 2}}}, "[parallelism.context] size = 1"),
        ("dp_shard.all_gather", {"sharding": {"stage": 3}}, "[sharding] stage = 2"),
        ("dp_shard.reduce_scatter", {}, '[compression] name = "bf16"'),
        ("dp_shard.reduce_scatter", {"compression": {"name": "bf16"}}, "[batch] global_size = 512"),
    ],
)
def test_the_step_against_waiting_is_that_of_the_axis(
    operation: str, tables: dict[str, Any], step: str, tmp_path: Path
) -> None:
    planted = Planted(tmp_path / "run", **tables).starts()
    planted.trains(20, communication=0.6, more={"exposed_seconds": {operation: 0.5, "world.all_reduce": 0.01}})
    found = judge(gather(planted.ends().directory)).first
    assert found.rule == "communication" and found.step.startswith(step), found


@pytest.mark.parametrize(
    ("bubble", "tables", "step"),
    [
        (0.3, {"batch": {"micro_size": 1, "global_size": 8}}, '[parallelism.pipeline] schedule = "interleaved-1f1b"'),
        (0.3, {"batch": {"micro_size": 1, "global_size": 8}, "parallelism": {"pipeline": {"size": 4, "schedule": "zbv"}}},
         "[batch] global_size = 16: more micro batches"),
        (0.6, {}, "[parallelism.pipeline] split: blocks of each stage"),
        (0.15, {}, "hpctrain profile"),
        (0.3, {"parallelism": {"pipeline": {"size": 1}}}, "hpctrain profile"),
    ],
)  # fmt: skip
def test_the_step_against_an_empty_pipeline(bubble: float, tables: dict[str, Any], step: str, tmp_path: Path) -> None:
    found = judge(gather(pipeline_idle(tmp_path / "run", bubble, **tables).directory)).first
    assert found.step.startswith(step), found


def test_the_waiting_of_an_empty_pipeline_is_told_once(tmp_path: Path) -> None:
    planted = Planted(tmp_path / "run", parallelism={"pipeline": {"size": 4}}).starts()
    waits = {"exposed_seconds": {"pp.recv": 0.5}, "pipeline_bubble": 0.4}
    planted.trains(
        20, memory=31 * GB, communication=0.6, more=waits
    )  # memory for larger micro batches, which would be fewer
    found = judge(gather(planted.ends().directory)).findings
    assert [one.rule for one in found] == ["pipeline"] and found[0].cost > 0.4, found


@pytest.mark.parametrize(
    ("every", "table", "told"),
    [
        (100, {"every_steps": 100}, r"\[checkpoint\] every_steps = 70$"),
        (100, {"every_steps": 0, "every_epochs": 1}, r"\[checkpoint\] every_steps = 70$"),
        (40, {"every_steps": 40}, r"\[checkpoint\] asynchronous = true: more saves would cost more"),
        (40, {"every_steps": 40, "asynchronous": True}, r"fewer losses: "),
    ],
)
def test_lost_steps_lead_to_as_many_saves_as_lose_least(
    every: int, table: dict[str, Any], told: str, tmp_path: Path
) -> None:
    planted = Planted(tmp_path / "run", steps=5 * every, checkpoint=table).starts()
    for _ in range(2):
        for steps in (every - 1, every - 1, every * 4 // 5):
            planted.trains(1, checkpoint=5.0).trains(steps)
            if steps == every - 1:
                planted.saves()
        planted.resumes(5)
    found = judge(gather(planted.trains(every).ends().directory))
    young = math.sqrt(2 * 5.0 * (planted.now - BEGIN) / 2) / 0.71
    assert (70 <= young < 80) if every == 100 else (50 <= young < 60), young
    first = next(one for one in found.findings if one.rule == "lost")
    assert re.match(told, first.step), first


@pytest.mark.parametrize(
    "stamp", ["0001-01-01 00:00:00,000+2359", "9999-12-31 23:59:59,999-2359", "2026-01-01 00:00:00,000+9999"]
)
def test_no_time_of_a_log_breaks_the_report(stamp: str, tmp_path: Path) -> None:
    planted = Planted(tmp_path / "run").starts().trains(5)
    failing(planted, 3, "TrainingError: of rank 3")
    for rank in (0, 1):
        text = f"{stamp} INFO rank {rank} of 16 on node1 (mpi)\n{stamp} INFO ValueError: x\n{stamp} WARNING x\n"
        with (planted.directory / "log" / f"rank-{rank:05d}.log").open("a") as file:
            file.write(text)
    assert "Failed" in markdown([gather(planted.long_ago().directory)])


def first_of(planted: Planted) -> tuple[str, str, str]:
    found = judge(gather(planted.long_ago().directory))
    return found.ended, found.first.rule, found.first.limit


def test_the_wait_for_a_slow_rank_is_told_once_also_where_the_run_has_failed(tmp_path: Path) -> None:
    slow = {"straggler": {"rank": 5, "node": "node2", "cause": "compute", "excess_seconds": 0.6}}
    for end in (
        "done         step 60, loss 2.1, 9 s",
        "TrainingError: step 61: loss nan, expected finite numbers",
        "x",
    ):
        planted = (
            Planted(tmp_path / end[:4]).starts().trains(8, communication=0.6).trains(52, communication=0.6, more=slow)
        )
        rules = [one.rule for one in judge(gather(planted.says(end).long_ago().directory)).findings]
        assert "straggler" in rules and "communication" not in rules, rules
    planted = Planted(tmp_path / "both").starts().trains(60, communication=3.0, more=slow).ends()
    both = {one.rule: one.limit for one in judge(gather(planted.directory)).findings}
    assert "besides the wait for the slow rank" in both["communication"] and "straggler" in both


@pytest.mark.parametrize(
    ("evaluations", "losses", "rule"),
    [
        ([2.0, 1.5, 1.6, 2.4], lambda step: 3 / step, "overfitting"),
        ([2.0, 1.5, 1.51, 1.52], lambda step: 3 / step, "healthy"),
        ([2.0, 1.5, 1.2, 1.1], lambda step: 3 / step, "healthy"),
        ([2.0, 1.5, 1.6, 2.4], lambda step: 1 + abs(step - 100) / 50, "unstable"),
        ([2.0, 2.0, 2.0, 2.0], lambda step: 1 + 20 * (80 < step < 140) + step % 3 / 10, "unstable"),
        ([2.0, 2.0, 2.0, 2.0], lambda step: 1 + step % 7 / 5, "healthy"),
    ],
)
def test_what_the_curves_of_the_loss_say(
    evaluations: list[float], losses: Callable[[int], float], rule: str, tmp_path: Path
) -> None:
    planted = Planted(tmp_path / "run").starts()
    for loss in evaluations:
        for _ in range(50):
            planted.trains(1, more={"loss": losses(planted.step + 1)})
        planted.evaluates(loss)
    ended, found, limit = first_of(planted.ends())
    assert (ended, found) == ("Finished at step 200 of 200", rule), limit
    if rule == "overfitting":
        assert "has risen from 1.5 at step 100 to 2.4 at step 200" in limit
    assert "best evaluation: loss" in markdown([gather(planted.directory)])


def test_a_hang_is_told_as_the_screen_tells_it(tmp_path: Path) -> None:
    planted = Planted(tmp_path / "run").starts().trains(19).says("rank 7 of 16 on node1 (mpi)", rank=7)
    planted.says(
        "hpctrain: watchdog: ranks 0-15 did not move for 15 s (step 20, forward)\n"
        "  missing: rank 7 on node1 is in step 20, forward for 18 s, at net.py:22 in forward: sleep(9)\n"
        "  waiting: ranks 0-6, 8-15 on node1, node2 are in step 20, sums of gradients"
    )
    planted.says("the watchdog ends this rank with 4").says("the watchdog ends this rank with 4", rank=7)
    facts = gather(planted.long_ago().directory)
    found = judge(facts)
    assert found.ended == "Ended by the watchdog, as it hung, in step 20 of 200, rank 7", found
    assert "rank 7 on node1 is in step 20, forward for 18 s, at net.py:22 in forward: sleep(9)" in found.first.limit
    assert found.first.step.endswith("log/rank-00007.log") and facts.events[-1].kind == "watchdog"


def test_a_killed_rank_an_error_of_all_ranks_and_a_time_limit_are_told_as_the_log_has_them(tmp_path: Path) -> None:
    killed = "rank 1 ended without an error message (SIGKILL): killed, or out of memory?"
    planted = Planted(tmp_path / "killed").starts().trains(24).says("rank 1 of 16 on node1 (mpi)", rank=1)
    assert first_of(planted.says(f"Killed: {killed}", rank=1)) == (
        "Killed after step 24 of 200, rank 1",
        "killed",
        killed,
    )
    planted = Planted(tmp_path / "all").starts().trains(9)
    for rank in range(3):
        failing(planted, rank, "TrainingError: step 10: the data is odd")
    assert first_of(planted)[0] == "Failed in step 10 of 200"
    for name, why, told in (("limit", ", as its time is nearly over", "its time limit"), ("asked", "", "a signal")):
        planted = Planted(tmp_path / name).starts().trains(24).says(f"stopped at step 24 of 200{why}, saved in x")
        assert first_of(planted)[0] == f"Stopped by {told} at step 24 of 200, and saved"


@pytest.mark.parametrize("kept", [slice(0, 30), slice(30, 60), slice(0, 60, 2)])
def test_rows_that_are_cut_are_told(kept: slice, tmp_path: Path) -> None:
    planted = Planted(tmp_path / "run", steps=60).starts().trains(60).ends()
    path = planted.directory / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[kept]))
    ended, rule, limit = first_of(planted)
    assert ended == "Finished at step 60 of 60" and rule == "rows" and "has 30 of 60 steps" in limit, (ended, limit)


def test_runs_are_compared_with_their_evaluations_and_a_share_is_the_same_in_sentence_and_table(tmp_path: Path) -> None:
    runs = [Planted(tmp_path / name).starts().trains(20, evaluation=1.0, checkpoint=0.5, data=0.5) for name in "ab"]
    runs[0].evaluates(1.5)
    runs[1].evaluates(1.25).trains(5).evaluates(1.75)
    text = markdown([gather(one.ends().directory) for one in runs])
    assert "| newest evaluation | 1.5 at step 20 | 1.75 at step 25 |" in text
    assert "| best evaluation | 1.5 at step 20 | 1.25 at step 20 |" in text
    (told,) = re.findall(r"(\d+)% of each step waits for data", markdown([gather(runs[0].directory)]))
    (shown,) = re.findall(r"\| data \| .* \| ([\d.]+)% \|", markdown([gather(runs[0].directory)]))
    assert round(float(shown)) == int(told)


def failing(planted: Planted, rank: int, error: str) -> None:
    planted.says(f"rank {rank} of 16 on node1 (mpi)", rank=rank).says(error, rank=rank)


def test_a_restart_is_not_blamed_for_the_error_of_an_earlier_start(tmp_path: Path) -> None:
    planted = Planted(tmp_path / "run").starts().trains(50).saves()
    failing(planted, 15, "TrainingError: of a rank that is no more")
    failing(planted, 3, "TrainingError: of a rank that does not come back")
    planted.now += 60
    planted.starts(0.1, ranks=8).says("CommunicationError: rank 3 is gone")
    planted.now += 5
    failing(planted, 1, "ValueError: of this start")
    found = judge(gather(planted.long_ago().directory))
    assert "of this start" in found.first.limit and "rank 1" in found.ended, found


def test_the_cause_is_found_among_more_ranks_than_have_failed_by_it(tmp_path: Path) -> None:
    planted = Planted(tmp_path / "run").starts(ranks=100).trains(5)
    for rank in range(1, 99):
        failing(planted, rank, "CommunicationError: rank 99 is gone")
    planted.now += 3
    failing(planted, 99, "TrainingError: the cause")
    found = judge(gather(planted.long_ago().directory))
    assert found.first.limit == "the cause" and "rank 99" in found.ended, found


def test_the_parts_of_the_wall_time_add_up_over_restarts(tmp_path: Path) -> None:
    planted = killed_and_resumed(tmp_path / "run")
    each = sum(COMPUTING.values()) + 0.04
    wall = gather(planted.directory).wall
    assert wall is not None and wall.starts == 2 and wall.lost_steps == 90
    assert wall.of["not running"] == pytest.approx(50, abs=0.01)
    assert wall.of["start and end"] == pytest.approx(20 + 20, abs=0.01)
    assert wall.of["stepping"] == pytest.approx(200 * (each - 0.01), rel=1e-6)
    assert wall.of["lost steps"] == pytest.approx(90 * each, rel=1e-6)
    assert wall.of["waiting for data"] == pytest.approx(200 * 0.01, rel=1e-6)
    assert sum(wall.of.values()) == pytest.approx(wall.seconds, rel=1e-9)


def test_a_clock_change_adds_no_time(tmp_path: Path) -> None:
    planted = Planted(tmp_path / "run").starts().trains(10)
    planted.hours = 1
    found = gather(planted.says("guard        a loss is high", "WARNING").ends().directory)
    assert found.wall is not None and found.wall.seconds == pytest.approx(planted.now - BEGIN, abs=0.01)
    assert [one.time for one in found.events if one.kind == "warning"] == [pytest.approx(planted.now, abs=0.01)]


def test_the_first_step_of_a_start_is_left_out_also_where_rows_have_the_times_of_the_step_before(
    tmp_path: Path,
) -> None:
    nothing = dict.fromkeys(COMPUTING, 0.0)
    planted = Planted(tmp_path / "run").starts().trains(1, data=0.0, communication=0.0, **nothing)
    planted.trains(1, forward=90.0).trains(20).saves()  # the first step compiles
    planted.resumes(5).trains(1, data=0.0, communication=0.0, **nothing).trains(1, forward=80.0).trains(10)
    found = gather(planted.directory)
    assert found.rows.steady_steps == 20 + 10
    assert found.step_seconds == pytest.approx(sum(COMPUTING.values()) + 0.04)
    assert found.rows.steady["forward"] == pytest.approx(30 * COMPUTING["forward"])
    assert sum(one.sums["forward"] for one in found.rows.points) == pytest.approx(30 * COMPUTING["forward"])


HOSTILE = "</svg></pre><script>alert(1)</script>|`$\\frac{a}$`\x1b[31m<img src=x onerror=alert(1)>&\"'\n# x"


@pytest.mark.nightly
def test_crafted_files_stay_text(tmp_path: Path) -> None:
    planted = Planted(tmp_path / "run", job={"name": HOSTILE, "x": {HOSTILE: [HOSTILE]}})
    planted.starts(
        command=HOSTILE, hosts=[HOSTILE], versions={HOSTILE: HOSTILE}, device=HOSTILE, ranks_of_hosts=[10**30]
    )
    planted.says(HOSTILE.replace("\n", " "), "WARNING").says(f"mesh         {HOSTILE[:60]} tp 16; x")
    slow = {"straggler": {"rank": 1, "node": HOSTILE, "cause": HOSTILE, "excess_seconds": 5.0}}
    planted.trains(
        10, more={**slow, "guard": HOSTILE, "exposed_seconds": {HOSTILE: 1.0}, "seconds": {HOSTILE: 1e300, "data": 1}}
    )
    with (planted.directory / "metrics.jsonl").open("a") as file:
        file.write(
            '[[[\n{"step": 1e999}\n{"step": 11, "loss": "x", "seconds": [1], "time": 1e300, "memory_bytes": 3}\n'
            + "[" * 100_000
            + "\n"
        )
    with (planted.directory / "starts.jsonl").open("a") as file:
        file.write(
            '{"time": "0001-01-01T00:00:00+00:00"}\n{"time": 5}\n[]\n{"time": "9999-12-31T23:59:59+14:00", "hosts": 3}\n'
        )
    other = healthy(tmp_path / "other")
    runs = [gather(planted.directory), gather(other.directory)]
    page, text = html_page(runs), markdown(runs)
    assert "<script" not in page and "<img" not in page and "\x1b" not in page + text and "&lt;script&gt;" in page
    outside_code = [line for line in text.splitlines() if not line.startswith("    ")]
    assert "<script" not in "\n".join(outside_code) and "\n# x" not in text
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg.replace("xlink:href", "href"))
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.thorough
def test_nothing_is_fetched_and_colours_follow_the_page(tmp_path: Path) -> None:
    page = html_page([gather(healthy(tmp_path / "run").directory)])
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"|@import|url\((?!#)', page)
    assert not re.findall(r"#0102[0-9a-f]{2}", page) and "var(--c0)" in page and "prefers-color-scheme: dark" in page
    assert "<text" in page and ">step</text>" in page  # text stays text
    assert len(page) < 1_500_000


@pytest.mark.thorough
def test_formats_and_refusals_as_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = killed_and_resumed(tmp_path / "run").directory
    assert execute(["report", str(run), "--format", "json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["state"] == "done" and found["step"] == 200 and found["axes"] == {"dp_shard": 4, "tp": 4}
    assert sum(found["wall"]["of"].values()) == pytest.approx(found["wall"]["seconds"])
    assert execute(["report", str(run), str(healthy(tmp_path / "b").directory), "--format", "markdown"]) == 0
    told = capsys.readouterr().out
    assert "## What differs" in told and "| checkpoint.every\\_steps | 100 | 50 |" in told, told
    assert execute(["report", str(tmp_path)]) == 2 and "job.resolved.toml" in capsys.readouterr().err
    assert execute(["report", str(run), "-o", str(tmp_path / "no" / "x.html")]) == 3
    assert "cannot be written" in capsys.readouterr().err


def trained(job: JobFile, output: Path, **hook: Any) -> dict[str, Any]:
    """Tables of the tiny job with the hook."""
    job.set(job={"output_dir": str(output)}).tables.update(hook=[{"name": "report", **hook}])
    return job.tables


@pytest.mark.thorough
def test_a_run_writes_its_report_at_its_end_and_after_an_error(job: JobFile, tmp_path: Path) -> None:
    assert hpctrain.run(trained(job, tmp_path / "a"))["exit_code"] == 0
    page, log = ((tmp_path / "a" / name).read_text() for name in ("report.html", "log/rank-00000.log"))
    assert "Finished at step 4 of 4" in page and "WARNING" not in log, log
    job.set(optimizer={"lr": 1e30}, job={"steps": 30})
    with pytest.raises(TrainingError, match="expected finite numbers"):
        hpctrain.run(trained(job, tmp_path / "b"))
    page = (tmp_path / "b" / "report.html").read_text()
    assert "Loss not finite (NaN)" in page and "[optimizer] lr = 1e+30 is far above what trains" in page


HOLDER = (
    "import sys, pathlib; from hpctrain_tools.runs.holder import holder_of; print(holder_of(pathlib.Path(sys.argv[1])))"
)


def test_a_run_that_asks_for_its_report_keeps_its_lock(tmp_path: Path) -> None:
    directory, lock = healthy(tmp_path / "run").directory, OutputLock()
    lock.take(directory)
    try:
        assert gather(directory, Ending("done")).ending.how == "done"
        told = subprocess.run(
            [sys.executable, "-c", HOLDER, str(directory)], capture_output=True, text=True, timeout=60, check=True
        )
    finally:
        lock.close()
    assert f"process {os.getpid()} on " in told.stdout and "holds=True" in told.stdout, told


class Squares(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sixty-four samples, each of which takes a while."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._seconds)
        return torch.tensor([index / 64]), torch.tensor([(index / 64) ** 2])


class Greedy(nn.Linear):
    """Lacks memory in its third step."""

    calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 1 GiB free.")
        return super().forward(inputs)


@pytest.mark.thorough
def test_stories_of_real_runs(tmp_path: Path) -> None:
    job: dict[str, Any] = {
        "job": {"name": "real", "steps": 8, "output_dir": str(tmp_path / "slow")},
        "model": {"name": nn.Linear, "in_features": 1, "out_features": 1, "loss": nn.functional.mse_loss},
        "dataset": {"name": Squares(0.02)}, "optimizer": {"name": "sgd", "lr": 0.1}, "batch": {"global_size": 4, "micro_size": 4},
    }  # fmt: skip
    hpctrain.run(job)
    found = judge(gather(tmp_path / "slow"))
    assert found.ended == "Finished at step 8 of 8" and found.first.rule == "data", found
    assert found.first.step == "[dataset] workers = 4", found
    greedy = {"name": lambda: Greedy(1, 1), "loss": nn.functional.mse_loss}
    job.update(model=greedy, dataset={"name": Squares(0)}, job={**job["job"], "output_dir": str(tmp_path / "greedy")})
    with pytest.raises(TrainingError, match="ran out of memory"):
        hpctrain.run(job)
    (tmp_path / "greedy" / "lock").unlink()  # this process holds it no more; another one would see that
    for path in (tmp_path / "greedy").rglob("*"):
        os.utime(path, (1e9, 1e9))
    found = judge(gather(tmp_path / "greedy"))
    assert re.match("Out of memory in step 3 of 8, rank 0", found.ended), found
    assert "asked for 20.00 GiB" in found.first.limit and found.first.step, found


@pytest.mark.nightly
def test_a_report_that_fails_or_takes_too_long_hides_nothing(job: JobFile, tmp_path: Path) -> None:
    assert hpctrain.run(trained(job, tmp_path / "a", limit_seconds=1e-6))["exit_code"] == 0
    assert "takes longer than 1e-06 s" in (tmp_path / "a" / "log" / "rank-00000.log").read_text()
    (tmp_path / "b" / "report.html").mkdir(parents=True)
    job.set(optimizer={"lr": 1e30}, job={"steps": 30})
    with pytest.raises(TrainingError, match="expected finite numbers"):
        hpctrain.run(trained(job, tmp_path / "b"))
    assert "the report is not written: IsADirectoryError" in (tmp_path / "b" / "log" / "rank-00000.log").read_text()


@pytest.mark.thorough
def test_many_rows_are_thinned_in_bounded_memory_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rows = tmp_path / "metrics.jsonl", 60_000
    with path.open("w") as file:
        for step in range(1, rows + 1):
            seconds = {"forward": 1.0, "data": 0.25, "checkpoint": 10.0 * (step % 1000 == 1)}
            file.write(
                json.dumps({"step": step, "time": 1e9 + step, "loss": 1 / step, "lr": 0.1, "seconds": seconds}) + "\n"
            )
    monkeypatch.setattr("hpctrain_tools.report.curves._WHOLE_BYTES", path.stat().st_size // 8)
    begin = time.monotonic()
    tracemalloc.start()
    found = RowReader(RunDirectory(tmp_path), [1e9]).read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.seen == rows and found.read < rows / 7 and found.weight == rows and len(found.points) <= 800
    assert found.steady["data"] / found.steady["forward"] == pytest.approx(0.25)
    assert found.steady["checkpoint"] == pytest.approx(
        10 * rows / 1000, rel=0.6
    )  # saves each 1000 steps are met all the same
    assert peak < 40e6 and time.monotonic() - begin < 60
    newest = found.newest
    assert newest is not None and (newest.step, newest.loss) == (rows, 1 / rows)
    assert found.of_starts[0].ended == 1e9 + rows
    assert found.points[0].first <= 8 and found.points[-1].last == rows
