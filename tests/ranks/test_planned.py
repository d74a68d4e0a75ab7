"""`hpctrain plan` against reality: the bytes, the traffic and the operations of a real step on each rank, measured as a plan
measures its own.

    OMP_NUM_THREADS=1 mpiexec -n 4 python -m pytest tests/ranks/test_planned.py -m "" -k random --draws 50

plans this many random layouts instead of the two of every night.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planned import JOBS, KEPT, OF_ACCELERATORS, OPERATIONS, measured, plan_of, refuse_difference, sent_of, tables_of
from test_random_layouts import two_layouts
from training import own_device

_BY_DEFAULT = "stage 3", "pipeline 2"


def _cases(jobs: dict[str, tuple[int, dict[str, Any]]]) -> list[Any]:
    return [
        pytest.param(
            name,
            tables,
            id=name,
            marks=[pytest.mark.ranks(ranks), pytest.mark.shown_on(ranks)]
            + ([] if name in _BY_DEFAULT else [pytest.mark.nightly]),
        )
        for name, (ranks, tables) in jobs.items()
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--draws") or 2))


@pytest.mark.cases(thorough=["stage 3"], rest="nightly")
@pytest.mark.parametrize(("name", "tables"), [*_cases(JOBS), *_cases(OF_ACCELERATORS)])
def test_a_plan_is_what_a_step_needs(
    world, root: Path, name: str, tables: dict[str, Any], pytestconfig: pytest.Config
) -> None:
    if name in JOBS and world.size != JOBS[name][0]:
        pytest.skip(f"shown on {JOBS[name][0]} ranks")
    if name in OF_ACCELERATORS and own_device().type == "cpu":
        pytest.skip("nothing is offloaded from a CPU")
    if own_device().type == "sim" and any(kind in name for kind in ("CNN", "LSTM", "8 bits")):
        pytest.skip("the simulated accelerator has no convolutions, recurrent layers and kernels of the compiler")
    made = tables_of(tables, root)
    planned = plan_of(made, root, world.gloo)
    found, sent = measured(made)
    mine = next((one for one in planned["of_ranks"] if one["rank"] == world.rank), None)
    if mine is None:  # another rank with this part of the model was planned
        return
    wire = sum(sent_of(mine).values()), sum(sent.get(name, 0) for name in OPERATIONS.values())
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
    flops = own_device().type == "cpu" or name in OF_ACCELERATORS
    refuse_difference(mine, found, sent, peak=not pytestconfig.getoption("--late"), flops=flops)


@pytest.mark.nightly
@pytest.mark.shown_on(4)
def test_a_plan_of_a_random_layout(world, root: Path, seed: int, pytestconfig: pytest.Config) -> None:
    tables, _ = two_layouts(seed, world.size)
    tables["job"]["output_dir"] = str(root / "out")
    tables["model"]["hidden_size"] *= 8  # so that the model outweighs the step's own numbers
    del tables["compression"]  # a plan leaves it out
    if "tokens" in tables["batch"]:
        pytest.skip("micro batches differ")
    try:
        planned = plan_of(tables, root, world.gloo)
        found, sent = measured(tables)
        for mine in planned["of_ranks"]:
            if mine["rank"] == world.rank:
                refuse_difference(mine, found, sent, peak=not pytestconfig.getoption("--late"))
    except BaseException as error:
        error.add_note(json.dumps(tables))
        raise
