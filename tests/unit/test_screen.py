"""What rank 0 prints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

import hpctrain
from hpctrain.contracts.identity import Identity
from hpctrain.loop.console import Console
from hpctrain.world.launcher_channel import LauncherChannel


def test_nothing_is_cut_off_on_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    console = Console(Identity(), LauncherChannel(terminal=True))
    row = {"loss": 10.12345, "lr": 1.23456e-4, "grad_norm": 0.0123456, "tokens_per_second": 123456789.0}
    for step, seconds in ((99998, 60.0), (99999, 2.0), (100000, 2.0)):  # the first step includes the setup
        console.progress({**row, "step": step, "step_seconds": seconds}, 100000, "tokens", "bubble 12%")
    console.close()
    out = capsys.readouterr().out
    assert "123,456,789" in out and "tokens/s  bubble 12%" in out and "ETA 0:00" in out and "…" not in out, out


def test_the_eta_follows_the_latest_steps_smoothly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hpctrain.loop.console._SECONDS_BETWEEN_LINES", 0.0)
    console = Console(Identity(), LauncherChannel())
    row = {"loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "samples_per_second": 5.0}
    for step in range(1, 101):
        seconds = {1: 600.0, 100: 20.0}.get(step, 1.0)  # the setup, and one step that was held up
        console.progress({**row, "step": step, "step_seconds": seconds}, 1100, "samples", "")
    etas = [line.split("ETA ")[1] for line in capsys.readouterr().out.splitlines()]
    assert etas[49] == "17:30" and etas[98] == "16:41"  # a second for each step
    assert etas[99] == "48:20"  # not 5:33:20


def test_a_resume_says_what_more_steps_do_to_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, sentence in (
        (
            "cosine",
            "schedule     cosine spans 4 steps now and spanned 2: at step 2 its factor on lr was 0 and is 0.75\n",
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
