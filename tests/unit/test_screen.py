"""What rank 0 prints."""

from __future__ import annotations

import copy
import io
import json
import logging
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hpctrain_tools.runs.log_seen import read_log
from jobs import TINY

import hpctrain
from hpctrain.contracts.identity import Identity
from hpctrain.ranks.prints import CLEAR_LINE, Labelled, labelled_prints, tell
from hpctrain.ranks.rank_channel import RankChannel
from hpctrain.training.console import Console
from hpctrain.training.log_file import logged_to_file


def test_the_bar_is_one_line_that_leaves_out_what_has_no_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other ranks print lines of their own: a bar of two lines would cover them."""
    monkeypatch.setenv("TERM", "xterm")
    row = {"loss": 10.12345, "lr": 1.23456e-4, "grad_norm": 0.0123456, "tokens_per_second": 123456789.0, "epoch": 2.5}
    for columns, least, absent in (
        (80, "epoch 2.50", "tokens/s"),
        (120, "123,456,789 tokens/s", "bubble"),
        (180, "bubble 12%", "…"),
    ):
        monkeypatch.setenv("COLUMNS", str(columns))
        console = Console(Identity(), RankChannel(terminal=True))
        console.progress({"evaluation_loss": 9.5, "step": 100}, 100000, "tokens", "")
        for step, seconds in ((99998, 60.0), (99999, 2.0), (100000, 2.0)):  # the first step includes the setup
            console.progress({**row, "step": step, "step_seconds": seconds}, 100000, "tokens", "bubble 12%")
        console.close()
        *_, shown = capsys.readouterr().out.rstrip("\n").split(CLEAR_LINE)
        assert shown.startswith("100000/100000  ===") and shown.endswith("0:00  ETA 0:00"), shown
        assert (
            "loss 10.1235  best 9.5000" in shown and least in shown and absent not in shown and len(shown) < columns
        ), shown


def test_a_wide_bar_has_the_slowest_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "xterm")
    row = {"lr": 1e-4, "grad_norm": 0.01, "tokens_per_second": 1000.0, "epoch": 2.5, "step_seconds": 1.0}
    slowest = {"straggler": {"rank": 5, "node": "node2", "cause": "data", "excess_seconds": 0.31}}
    for columns, told in ((80, False), (135, False), (150, True)):
        monkeypatch.setenv("COLUMNS", str(columns))
        console = Console(Identity(), RankChannel(terminal=True))
        for step in range(1, 101):
            console.progress({**row, **slowest, "loss": 100.0 - step, "step": step}, 100, "tokens", "")
        console.close()
        *_, shown = capsys.readouterr().out.rstrip("\n").split(CLEAR_LINE)
        assert re.search(r"={8,}  loss 0\.0000", shown), (columns, shown)
        assert ("slowest rank 5 on node2: data +0.31 s" in shown) is told and len(shown) < columns, (columns, shown)


def test_a_rank_s_log_has_what_is_printed_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = Identity(1, 2)
    echo = logging.StreamHandler(
        sys.stdout
    )  # as a user may set it up: what is printed must not be logged and printed again
    logging.getLogger().addHandler(echo)
    try:
        with labelled_prints(rank), logged_to_file(tmp_path, rank):
            print("two\nlines")
            print("an error", file=sys.stderr)
    finally:
        logging.getLogger().removeHandler(echo)
    lines = (tmp_path / "log" / "rank-00001.log").read_text().splitlines()
    assert [line.partition(" PRINT ")[2] for line in lines if "PRINT" in line] == ["two", "lines", "an error"]
    assert capsys.readouterr().out.count("lines") == 1


def test_the_times_of_a_log_are_true_whatever_the_clock_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = time.time()
    try:
        with logged_to_file(tmp_path, Identity()):
            for zone in ("WEST+7", "EAST-5:30"):
                monkeypatch.setenv("TZ", zone)
                time.tzset()
                logging.getLogger("hpctrain").warning("in %s", zone)
    finally:
        monkeypatch.undo()
        time.tzset()
    remarks = read_log(tmp_path / "log" / "rank-00000.log").remarks
    assert [one.text for one in remarks] == ["in WEST+7", "in EAST-5:30"]
    assert all(begin - 0.01 <= one.time.timestamp() <= time.time() for one in remarks), remarks


def test_prints_are_whole_lines_with_their_rank() -> None:
    """Not torn where ranks share a file: each line is one write."""
    written: list[str] = []

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return len(text)

    stream = Labelled(Screen(), "[rank 3] ")
    for text in ("one", " line\nand", " another\n", "10%\r", "20%\r\n", "\n"):
        stream.write(text)
    stream.write("no end")
    assert written == ["[rank 3] one line\n", "[rank 3] and another\n", "[rank 3] 20%\n", "[rank 3] \n"]
    stream.end()
    assert written[4:] == ["[rank 3] no end\n"]


def test_a_labelled_stream_has_the_encoding_of_its_file_and_escapes_what_that_has_not() -> None:
    file = io.TextIOWrapper(io.BytesIO(), "latin-1", "strict")
    stream = Labelled(file, "[rank 3] ")
    assert (stream.encoding, stream.errors) == ("latin-1", "strict")
    stream.write("é ━\n")
    assert file.buffer.getvalue() == b"[rank 3] \xe9 \\u2501\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("errors_shown", [True, False])
def test_a_file_of_the_errors_of_a_job_on_a_terminal_has_no_bars(
    errors_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    for size, label in ((1, ""), (2, "[rank 0] ")):
        err.truncate(err.seek(0))
        with labelled_prints(Identity(0, size), True, errors_shown):
            Labelled.bar = "(bar)"
            print("mine", file=sys.stderr)
            tell("ours")
            print("output")
        begin, end = (CLEAR_LINE, "(bar)") if errors_shown else ("", "")
        assert err.getvalue() == f"{begin}{label}mine\n{end}{begin}ours\n{end}"
        assert out.getvalue().endswith(f"{CLEAR_LINE}{label}output\n(bar)")


def test_a_program_may_have_no_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon, or a shell's >&- 2>&-."""
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    console = Console(Identity(0, 2), channel := RankChannel())
    with labelled_prints(Identity(0, 2), channel.terminal, channel.error_terminal):
        console.line("nobody reads it")
        tell("nobody reads it")
        print("nobody reads it")


def test_a_prompt_of_the_only_rank_does_not_wait_and_the_bar_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Labelled, "bar", "(bar)")
    stream = Labelled(screen := io.StringIO(), CLEAR_LINE)
    stream.write("(Pdb) ")
    stream.flush()
    assert screen.getvalue() == f"{CLEAR_LINE}(Pdb) "
    stream.write("answer\n")
    assert screen.getvalue() == f"{CLEAR_LINE}(Pdb) answer\n(bar)"
    screen.truncate(screen.seek(0))
    for text in ("\r10%", "\r20%", " more", "\n"):
        print(text, end="", flush=True, file=stream)
    assert screen.getvalue() == f"{CLEAR_LINE}10%{CLEAR_LINE}20% more\n(bar)"


@pytest.mark.thorough
def test_lines_and_the_log_tell_epoch_time_and_the_best_after_a_resume_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tables: dict[str, Any] = copy.deepcopy(TINY)
    tables["evaluation"] = {"every_steps": 2}
    hpctrain.run(tables)
    tables["job"]["steps"] = 5
    hpctrain.run(tables)
    out = capsys.readouterr().out
    rows = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    best = min((row["evaluation_loss"], row["step"]) for row in rows if "evaluation_loss" in row and row["step"] < 5)
    epoch = 5 * 12 / 500
    assert re.search(
        rf"step 5/5 .* best {best[0]:.4f} \(step {best[1]}\)  epoch {epoch:.2f} .* elapsed 0:0\d  ETA 0:00\n", out
    ), out
    log = Path("out/log/rank-00000.log").read_text()
    assert all(line in log for line in out.splitlines()), (out, log)


@pytest.mark.thorough
def test_each_start_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/hpctrain", "run", "job.toml"])
    hpctrain.run(TINY)
    subprocess.run([*git, "init", "-q"], check=True)
    Path("code.py").write_text("")
    for command in (["add", "code.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    hpctrain.run({**TINY, "job": {**TINY["job"], "steps": 5}})
    Path("code.py").write_text("changed")
    hpctrain.run({**TINY, "job": {**TINY["job"], "steps": 6}})
    starts = [json.loads(line) for line in Path("out/starts.jsonl").read_text().splitlines()]
    assert [start["git"] for start in starts] == [
        None, {"commit": commit, "changed": False}, {"commit": commit, "changed": True},
    ]  # fmt: skip
    first = starts[0]
    assert first["command"] == "hpctrain run job.toml" and first["directory"] == str(tmp_path) and first["ranks"] == 1
    assert (
        first["hosts"] == [socket.gethostname().partition(".")[0]] and first["versions"]["torch"] == torch.__version__
    )
    assert f"hpctrain {hpctrain.__version__}" in first["plugins"]


def test_the_eta_follows_the_latest_steps_smoothly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hpctrain.training.console._SECONDS_BETWEEN_LINES", 0.0)
    console = Console(Identity(), RankChannel())
    row = {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "samples_per_second": 5.0}
    for step in range(1, 101):
        seconds = {1: 600.0, 100: 20.0}.get(step, 1.0)  # the setup, and one step that was held up
        console.progress({**row, "step": step, "step_seconds": seconds}, 1100, "samples", "")
    etas = [line.split("ETA ")[1] for line in capsys.readouterr().out.splitlines()]
    assert etas[49] == "17:30" and etas[98] == "16:41"  # a second for each step
    assert etas[99] == "48:20"  # not 5:33:20


@pytest.mark.thorough
def test_a_resume_says_what_more_steps_do_to_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, sentence in (
        (
            "cosine",
            "schedule     cosine spans 4 steps now and spanned 2 before\n",
        ),
        ("constant", ""),
    ):
        tables: dict[str, Any] = copy.deepcopy(TINY)
        tables["job"] |= {"steps": 2, "output_dir": name}
        tables["schedule"] = {"name": name}
        hpctrain.run(tables)
        capsys.readouterr()
        tables["job"]["steps"] = 4
        hpctrain.run(tables)
        out = capsys.readouterr().out
        assert "from step 2" in out and (sentence in out if sentence else "schedule  " not in out), out
