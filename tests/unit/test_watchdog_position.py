"""Phases without a limit: the first samples, and where kernels are compiled each phase that is entered for the first time."""

from __future__ import annotations

import pytest

from hpctrain.ranks.watchdog.position import Position
from hpctrain.ranks.watchdog.status import Beat
from hpctrain.training.guard.replicas import parted

STEP = ("data", "forward", "backward", "sums of gradients", "optimizer")


@pytest.mark.parametrize("compiles", [False, True])
def test_the_first_step_of_a_job_that_compiles_has_no_limit(compiles: bool) -> None:
    position, overdue = Position(), []
    position.compiles = compiles
    for step in range(2):
        for phase in (*STEP, "evaluation") if step else STEP:
            with position.inside(phase, step):
                beat = Beat(position.phase, position.step, idle=11.0)
                overdue.append(beat.is_overdue(10.0))
                assert phase == "data" or beat.where.startswith(f"step {step + 1}, {phase}")
    assert overdue == [False, *[not compiles] * 4, *[True] * 5, not compiles], "an evaluation is compiled, too"
    position.move("between phases")
    assert Beat(position.phase, position.step, idle=11.0).is_overdue(10.0)


def test_ranks_that_ran_other_blocks_are_told_and_one_that_is_further_is_not() -> None:
    assert (
        parted({0: ["a", "b"], 1: ["a", "b", "c"]}) is None
        and parted({0: [], 1: ["a"]}) is None
        and parted({2: ["a"]}) is None
    )
    assert "(rank 1 left out b)" in str(parted({0: ["a", "b", "c"], 1: ["a", "c"]}))
    assert "(rank 1 left out b)" in str(parted({0: ["a", "b"], 1: ["a", ""]})), "its forward is over"
    assert "(rank 0 ran a where rank 1 ran b)" in str(parted({0: ["a", "b"], 1: ["b", "a"]}))
