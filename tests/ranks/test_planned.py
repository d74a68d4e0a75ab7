"""`hpctrain plan` against reality: the bytes and the traffic of a real step on each rank, measured as a plan measures its own.

tests/planned_table.py makes the table in docs from these tests.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned import JOBS, OF_ACCELERATORS, OPERATIONS, measured, plan_of, tables_of
from training import own_device

_BY_DEFAULT = "stage 3", "pipeline 2"
KEPT = "parameters_bytes", "gradients_bytes", "optimizer_state_bytes"
ROW = 8 * 64
"""Bytes of a step's own numbers, which no plan counts: those of its row of metrics, below 64, and the count of its labels."""


def _cases(jobs: dict[str, tuple[int, dict[str, Any]]]) -> list[Any]:
    return [
        pytest.param(
            name,
            tables,
            id=name,
            marks=[pytest.mark.ranks(ranks), pytest.mark.shown_on(ranks)]
            + ([] if name in _BY_DEFAULT else [pytest.mark.thorough]),
        )
        for name, (ranks, tables) in jobs.items()
    ]


@pytest.mark.parametrize(("name", "tables"), [*_cases(JOBS), *_cases(OF_ACCELERATORS)])
def test_a_plan_is_what_a_step_needs(
    world, root: Path, name: str, tables: dict[str, Any], pytestconfig: pytest.Config
) -> None:
    if name in JOBS and world.size != JOBS[name][0]:
        pytest.skip(f"shown on {JOBS[name][0]} ranks")
    if name in OF_ACCELERATORS and own_device().type == "cpu":
        pytest.skip("nothing is offloaded from a CPU")
    made = tables_of(tables, root)
    planned = plan_of(made, root)
    found, sent = measured(made)
    mine = next((one for one in planned["of_ranks"] if one["rank"] == world.rank), None)
    if mine is None:  # another rank with this part of the model was planned
        return
    told = {one["operation"]: 0 for one in mine["exchanges"]}
    for one in mine["exchanges"]:
        told[one["operation"]] += one["nbytes"]
    wire = sum(told.get(name, 0) for name in OPERATIONS), sum(sent.get(name, 0) for name in OPERATIONS.values())
    table = pytestconfig.getoption("--planned")
    if table is not None and mine is planned["of_ranks"][0]:
        row = {
            "job": name,
            "ranks": world.size,
            "kept": sum(mine[name] for name in KEPT),
            "wire": wire[0],
            "sent": wire[1],
        }
        row |= {
            "planned": mine["peak_bytes"],
            "measured": found["peak_bytes"],
            "kept_measured": sum(found[name] for name in KEPT),
        }
        with table.open("a") as file:
            file.write(json.dumps(row) + "\n")
    for name in KEPT:
        assert mine[name] == found[name], name
    if not pytestconfig.getoption("--late"):  # whose copies count
        assert mine["peak_bytes"] == pytest.approx(found["peak_bytes"], rel=0.05)
    assert sum(mine["flops"].values()) == found["flops"]
    for name, of_mpi in OPERATIONS.items():
        assert sent.get(of_mpi, 0) - told.get(name, 0) in range(ROW), name
