"""`hpctrain top` beside a real training, in terminals of several sizes; `hpctrain runs` as typed."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator

import pytest
from jobs import JobFile
from launching import KILL, SOON, TERMINATE, Started, hpctrain, in_process, run, started, wait_until
from tmux import terminal

pytestmark = pytest.mark.timeout(240)

SLOW = ("--set", "plugins.load=['slow']")
TOP = "python -m hpctrain top"
CURVE = "[▁▂▃▄▅▆▇█]{5}"


@pytest.fixture
def training(job: JobFile) -> Iterator[Started]:
    """A job of 100,000 steps with evaluations and checkpoints, which has trained ten."""
    job.set(job={"steps": 100_000}, evaluation={"every_steps": 5}, checkpoint={"every_steps": 5}).sleeps(0.05)
    with started(hpctrain("run", "job.toml", *SLOW), job.directory) as command:
        job.wait_for_steps(12)
        yield command


def words(screen: str) -> list[str]:
    """The first word of each line."""
    return [line.split()[0] for line in screen.splitlines() if line.strip()]


def test_a_training_is_seen_from_another_terminal(job: JobFile, training: Started) -> None:
    with terminal(80, 24, job.directory) as tmux:
        tmux.type("stty -g > before", "Enter", f"{TOP} out; stty -g > after", "Enter")
        first = tmux.wait_for(r"^step \d+/100000 +─+ +0% +ETA \d")
        assert tmux.flags() == "1 0" and tmux.is_coloured
        assert re.search(rf"^out +running +\(process {training.process.pid} on ", first, re.MULTILINE), first
        for line in (
            r"loss \d\.\d{4}", CURVE, r"evaluation \d\.\d{4} \(step \d+\)  best \d\.\d{4} \(step \d+\)",
            r"[\d,]+ tokens/s  [\d.]+ m?s a step", r"time: \w+ \d+%", r"lr 0\.01  grad norm \d",
            r"memory max \d\.\d\d GiB", r"checkpoint step-0\d+", r"INFO|\d\d:\d\d:\d\d plugins +gpt", "q ends the view",
        ):  # fmt: skip
            assert re.search(line, first), (line, first)
        step = int(re.findall(r"step (\d+)/100000", first)[0])
        (listed,) = json.loads(in_process("runs", ".", "--json", cwd=job.directory).out)
        assert listed["state"] == "running" and str(training.process.pid) in listed["detail"], listed
        rows = {row["step"]: row for row in job.rows()}
        assert f"loss {rows[step]['loss']:.4f}" in first
        tmux.resize(40, 10)
        small = tmux.wait_for(r"^step \d+/100000 +─{5,17} +0%")
        assert words(small)[:4] == ["out", "step", "loss", "evaluation"] and len(small.splitlines()) <= 10, small
        wait_until(lambda: f"step {step}/" not in tmux.shown(), 30, "a later step")
        tmux.type("q")
        tmux.wait_for(r"\$ *$")
        assert tmux.flags() == "0 1" and TOP in tmux.shown() and "loss" not in tmux.shown(), tmux.shown()
        wait_until((job.directory / "after").exists, 30, "the end of the view")
        assert (job.directory / "before").read_text() == (job.directory / "after").read_text()
    assert training.process.poll() is None


@pytest.mark.thorough
def test_runs_are_listed_and_one_is_printed_once(job: JobFile) -> None:
    assert run(hpctrain("run", "job.toml", "--set", "job.output_dir='runs/a'"), job.directory).code == 0
    listed = in_process("runs", cwd=job.directory)
    loss = job.losses("runs/a")[-1]
    head, row = listed.out.splitlines()
    assert head.split() == ["RUN", "STATE", "STEP", "LOSS", "EVALUATION", "WROTE", "JOB", "CHECKPOINT"], listed
    assert re.fullmatch(rf"runs/a +done +4/4 +{loss:.4f} +- +\d+ s ago +- +step-00000004", row), listed
    (found,) = json.loads(in_process("runs", "--json", cwd=job.directory).out)
    assert (found["state"], found["step"], found["loss"], found["job"]) == ("done", 4, job.losses("runs/a")[-1], None)
    quick = "import sys; from hpctrain.cli import execute; [execute(one) for one in (['runs'], ['top', 'runs/a'])]; "
    assert run([sys.executable, "-c", f"{quick} sys.exit('torch' in sys.modules)"], job.directory).code == 0
    once = in_process("top", "runs/a", cwd=job.directory)  # a pipe: a single frame
    assert once.code == 0 and once.out.splitlines()[0].startswith("runs/a  done") and "\x1b" not in once.out, once
    assert f"loss {loss:.4f}" in once.out and "step 4/4" in once.out and "100%  ended" in once.out, once
    later = in_process("top", "runs/b", cwd=job.directory)
    assert later.code == 0 and "runs/b  pending  (no run is here yet" in later.out, later
    for words in (("top", "job.toml"), ("top", "runs"), ("runs", "nowhere")):
        wrong = in_process(*words, cwd=job.directory)
        assert wrong.code == 2 and wrong.out == "" and wrong.err.count("\n") == 1 and "found no" in wrong.err, wrong


@pytest.mark.cases(thorough=["40-10"], rest="nightly")
@pytest.mark.parametrize(("columns", "lines"), [(40, 10), (80, 24), (200, 50)])
def test_a_view_of_any_size_without_colours(columns: int, lines: int, job: JobFile, training: Started) -> None:
    with terminal(columns, lines, job.directory, {"NO_COLOR": "1"}) as tmux:
        tmux.type(f"{TOP} out", "Enter")
        screen = tmux.wait_for(rf"loss \d\.\d{{4}}  {CURVE}" if lines < 24 else rf"^ +\d\.\d+ [ {CURVE[1:9]}]+$")
        assert not tmux.is_coloured and tmux.flags() == "1 0"
        assert words(screen)[:3] == ["out", "step", "loss"] and max(map(len, screen.splitlines())) <= columns, screen
        there = {
            "evaluation \\d": 10, "tokens/s": 10, "time: ": 10, "grad norm": 10, "memory max": 10, "checkpoint step": 10,
            "q ends the view, not the run": 24, "adamw": 24, "rank 0 of 1 on": 50,
        }  # fmt: skip
        for text, least in there.items():
            assert (re.search(text, screen) is not None) is (lines >= least), (text, screen)
        for width, height in ((120, 12), (20, 3), (columns, lines)):
            tmux.resize(width, height)
            bar = min(60, width - 34) if width >= 40 else 0
            shown = tmux.wait_for(rf"\A(out|…).*\nstep \d+/100000 +─{{{max(0, bar - 6)},60}} ")
            assert len(shown.splitlines()) <= height, shown
        tmux.type("q")
        tmux.wait_for(r"\$ *$")
        tmux.type("clear; python -m hpctrain runs .", "Enter")
        head, row = tmux.wait_for(r"^out .*\n\$ *$").splitlines()[:2]
        assert head.split()[:4] == ["RUN", "STATE", "STEP", "LOSS"] and row.split()[1] == "running", (head, row)
        assert (len(head.split()) == 4) is (columns == 40) and not tmux.is_coloured, head


@pytest.mark.nightly
def test_the_view_goes_on_over_a_stop_a_resume_a_kill_and_the_end(job: JobFile) -> None:
    job.set(job={"steps": 100_000}, checkpoint={"every_steps": 5}).sleeps(0.02)
    with terminal(80, 24, job.directory) as tmux:
        with started(hpctrain("run", "job.toml", *SLOW), job.directory) as first:
            job.wait_for_steps(12)
            tmux.type(f"{TOP} out; echo code $?", "Enter")
            tmux.wait_for(r"^out  running .*\n^step \d\d+/100000 ")
            first.process.send_signal(SOON)
            assert first.finish(60).code == 75
        stopped = tmux.wait_for(r"^out  stopped")
        assert "ended; q ends the view" in stopped and re.search(r"step \d+/100000 .* ended$", stopped, re.MULTILINE), (
            stopped
        )
        with started(hpctrain("run", "job.toml", *SLOW), job.directory) as second:
            tmux.wait_for(r"^out  running ")
            second.process.send_signal(KILL)
            second.process.wait(30)
        killed = tmux.wait_for(r"^out  failed")
        steps = int(re.findall(r"step (\d+)/", killed)[0])
        assert steps > 12
        done = run(hpctrain("run", "job.toml", "--set", f"job.steps={steps + 10}"), job.directory)
        assert done.code == 0, done
        ended = tmux.wait_for(r"^out  done")
        assert f"step {steps + 10}/{steps + 10}" in ended and "100%  ended" in ended, ended
        assert f"loss {job.losses()[-1]:.4f}" in ended and "done         step" in ended, ended
        tmux.type("C-c")
        tmux.wait_for(r"^code 0")
        assert tmux.flags() == "0 1"


@pytest.mark.thorough
def test_the_terminal_is_given_back_at_ctrl_z_and_sigterm(job: JobFile, training: Started) -> None:
    with terminal(80, 24, job.directory) as tmux:
        tmux.type(f"stty -a > before; {TOP} out", "Enter")
        tmux.wait_for("q ends the view")
        tmux.type("C-z")
        tmux.wait_for(r"Stopped .* top out")
        assert tmux.flags() == "0 1"
        tmux.type("jobs -p > pid; stty -a > between; fg", "Enter")
        tmux.wait_for("q ends the view")
        assert tmux.flags() == "1 0"
        view = int((job.directory / "pid").read_text())
        assert view != training.process.pid
        os.kill(view, TERMINATE)
        tmux.wait_for(r"\$ *$")
        assert tmux.flags() == "0 1"
        tmux.type("stty -a > after", "Enter")
        wait_until(
            lambda: (job.directory / "after").exists() and (job.directory / "after").read_text(), 30, "the modes"
        )
        for name in ("between", "after"):
            assert (job.directory / name).read_text() == (job.directory / "before").read_text()


@pytest.mark.thorough
def test_several_runs_share_the_terminal(job: JobFile, training: Started) -> None:
    assert (
        run(hpctrain("run", "job.toml", "--set", "job.output_dir='other'", "--set", "job.steps=3"), job.directory).code
        == 0
    )
    waiting = job.directory / "waiting"
    waiting.mkdir()
    (waiting / "submissions.jsonl").write_text('{"target": "slurm", "id": "17"}\n')
    with terminal(80, 24, job.directory) as tmux:
        tmux.type(f"{TOP} out other waiting", "Enter")
        screen = tmux.wait_for("q ends the view")
        heads = [number for number, word in enumerate(line.split(" ")[0] for line in screen.splitlines())
                 if word in ("out", "other", "waiting")]  # fmt: skip
        assert len(heads) >= 3 and heads[1] > 6 and "step 3/3" in screen and "slurm job 17" in screen, screen
        assert "waiting for the first step" in screen and "pending" in screen, screen
        tmux.resize(80, 2)
        tmux.wait_for(r"^out  running  step \d+/100000  loss \d\.\d+\n^and 2 more")
