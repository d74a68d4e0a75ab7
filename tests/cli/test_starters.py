"""Programs whose ranks another program starts, as on several nodes: they meet by its secret, and tell it how they end."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hpctrain_tools.launch.channel_directory import ChannelDirectory, ending_in
from launching import Finished, Started, started

from hpctrain.base.launcher_variables import RankNumbers, started_variables

PROGRAM = """
import os, signal, sys, torch, hpctrain

with hpctrain.own_loop({"job": {"name": "own", "steps": 4}, "communicator": {"name": "gloo"}}) as loop:
    net = torch.nn.Linear(2, 1)
    model, optimizer = loop.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for step in loop.steps():
        loop.print(step.number, loop.checkpoint)
        if step.number == 2 and loop.rank == 1:
            if sys.argv[1] == "fails":
                raise ValueError("a mistake")
            if sys.argv[1] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            loop.save()
        loop.backward(model(torch.full((1, 2), 1.0 + loop.data_rank)).mean())
        optimizer.step()
        optimizer.zero_grad()
    loop.print("of", loop.data_size)
"""


@pytest.fixture
def channels(tmp_path: Path) -> Iterator[list[ChannelDirectory]]:
    """The directories of two ranks, as on two nodes."""
    made, secret = [], secrets.token_hex(32)  # another test may run beside this one, at the same ports
    for rank in range(2):
        directory = tmp_path / f"start.{rank}"
        directory.mkdir(mode=0o700)
        (directory / "secret").write_text(secret)
        (directory / "secret").chmod(0o600)
        made.append(ChannelDirectory(directory))
    yield made
    for one in made:
        one.close()


def start(channels: list[ChannelDirectory], tmp_path: Path, how: str) -> tuple[Finished, Finished]:
    """Both ranks to their ends."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with ExitStack() as stack:
        ranks: list[Started] = []
        for rank, channel in enumerate(channels):
            numbers = RankNumbers(rank, 2, 0, 1)
            told = started_variables(numbers, channel.directory, "127.0.0.1", {})
            words = [sys.executable, "program.py", how]
            ranks.append(stack.enter_context(started(words, tmp_path, told)))
        first, second = (one.finish(90) for one in ranks)
    return first, second


@pytest.mark.nightly
def test_ranks_meet_and_save_when_one_asks(channels: list[ChannelDirectory], tmp_path: Path) -> None:
    done = start(channels, tmp_path, "ends")
    assert [one.code for one in done] == [0, 0], done
    assert [one.exit_code for one in channels] == [0, 0]
    saved = "runs/own/checkpoints/step-00000002"
    assert [line for line in done[0].out.splitlines() if line[0] in "1234o"][-5:] == [
        "1 None", "2 None", f"3 {saved}", f"4 {saved}", "of 2",
    ]  # fmt: skip


@pytest.mark.nightly
def test_a_failure_is_told_by_all_ranks(channels: list[ChannelDirectory], tmp_path: Path) -> None:
    done = start(channels, tmp_path, "fails")
    assert [one.exit_code for one in channels] == [4, 4], done
    told = [ending_in(one.directory).error for one in channels]
    assert told[0] == "" and re.fullmatch(r"rank 1 on \S+ failed: ValueError: a mistake", told[1]), told
    assert "ValueError: a mistake" in done[1].err and "Traceback" not in done[0].err, done


@pytest.mark.nightly
def test_a_rank_that_was_killed_tells_nothing(channels: list[ChannelDirectory], tmp_path: Path) -> None:
    done = start(channels, tmp_path, "killed")
    assert [one.exit_code for one in channels] == [4, None], done
