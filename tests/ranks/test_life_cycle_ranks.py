"""A plugin on one rank affects all ranks: it can end the run, and its errors end all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from training import job, session_of

from hpctrain.api import Control, Piece, PluginState, hookimpl
from hpctrain.base.errors import TrainingError
from hpctrain.mpi import OperationMismatchError
from hpctrain.ranks.signals import StopRequest
from hpctrain.training.loop import train


class OneRank:
    """The last rank's plugin acts in a hook; the plugins of the others record what they see."""

    def __init__(self) -> None:
        self.mine = dist.get_rank() == dist.get_world_size() - 1


class Ends(OneRank):
    @hookimpl
    def hpctrain_step_end(self, step: int, control: Control) -> None:
        if self.mine and step == 3:
            control.stop("the last rank has seen enough")


class Fails(OneRank):
    def __init__(self, hook: str) -> None:
        super().__init__()
        self._hook = hook

    def _fail(self, hook: str) -> None:
        if self.mine and hook == self._hook:
            raise ValueError("boom")

    @hookimpl
    def hpctrain_job_start(self) -> None:
        self._fail("job_start")

    @hookimpl
    def hpctrain_checkpoint_saved(self) -> None:
        self._fail("checkpoint_saved")

    @hookimpl
    def hpctrain_job_end(self) -> None:
        self._fail("job_end")


class Gathers(OneRank):
    """Fails before a collective of its hook that the other ranks enter."""

    @hookimpl
    def hpctrain_job_start(self) -> None:
        if self.mine:
            raise ValueError("boom")
        dist.broadcast(torch.zeros(7), 0)


class Counts(OneRank):
    """Each rank counts its own steps in a replicated tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.zeros((), dtype=torch.int64)
        self.restored: list[dict[str, Any]] = []

    @hookimpl
    def hpctrain_state(self) -> PluginState:
        return PluginState("counts", [Piece.whole("steps", self.steps)], lambda: {"a": [1]}, self.restored.append)

    @hookimpl
    def hpctrain_step_end(self) -> None:
        self.steps += 1


@pytest.mark.ranks(2)
def test_one_rank_s_wish_ends_the_run_of_all(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with session_of(job(job={"output_dir": str(root), "steps": 6}), Ends()) as session:
        result = train(session, StopRequest())
        newest = session.newest_checkpoint
    assert result["step"] == 3 and result["exit_code"] == 0
    assert newest is not None and newest.name == "step-00000003"
    if dist.get_rank() == 0:
        assert capsys.readouterr().out.count("ended        after step 3: the last rank has seen enough") == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("hook", ["job_start", "checkpoint_saved", "job_end"])
def test_one_rank_s_error_is_everybody_s(root: Path, hook: str) -> None:
    """Also after the last step, where the others have nothing left to wait for."""
    told = pytest.raises(TrainingError, match="raised ValueError: boom in hpctrain_" + hook)
    with session_of(job(job={"output_dir": str(root), "steps": 2}), Fails(hook)) as session, told:
        train(session, StopRequest())


@pytest.mark.ranks(2)
def test_an_error_before_a_collective_is_not_lost(root: Path) -> None:
    plugin = Gathers()
    expected: type[Exception] = TrainingError if plugin.mine else OperationMismatchError
    tables = job(job={"output_dir": str(root), "steps": 2})
    with session_of(tables, plugin) as session, pytest.raises(expected):
        train(session, StopRequest())


@pytest.mark.ranks(2)
def test_state_comes_back_on_every_rank(root: Path) -> None:
    tables = job(job={"output_dir": str(root), "steps": 3})
    with session_of(tables, Counts()) as session:
        train(session, StopRequest())
    tables["job"]["steps"] = 5
    with session_of(tables, counts := Counts()) as session:
        assert counts.steps == 3 and counts.restored == [{"a": [1]}]
        train(session, StopRequest())
    assert counts.steps == 5
