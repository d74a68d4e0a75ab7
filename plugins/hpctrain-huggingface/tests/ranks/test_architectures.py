"""Architectures by layout: each has the losses of a plain loop on what from_pretrained gives, or is refused.

architectures_table.py makes docs/architectures.md of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hub_models
import pytest
import torch
import torch.distributed as dist
from hub_models import ARCHITECTURES
from test_stages import compare
from training import train_here

from hpctrain.base.errors import HpctrainError
from hpctrain.checking.check import check
from hpctrain.job.raw import RawJob

PAGE = Path(__file__).parents[4] / "docs" / "architectures.md"
LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 3": {"sharding": {"stage": 3}},
    "tensor": {"parallelism": {"tensor": 2}},
    "pipeline": {"parallelism": {"pipeline": 2}},
    "context": {"parallelism": {"context": 2}},
}


_BY_DEFAULT = ("gpt_neox", "stage 3"), ("falcon", "tensor"), ("deepseek_v2", "tensor"), ("mamba", "stage 0")


def tried() -> dict[str, dict[str, str]]:
    """The table on the page."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("|")]
    return {name: dict(zip(lines[0][1:], cells, strict=True)) for name, *cells in lines[2:]}


@pytest.mark.usefixtures("world")
@pytest.mark.ranks(2)
@pytest.mark.shown_on(2)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[] if (name, layout) in _BY_DEFAULT else [pytest.mark.nightly])
        for name in ARCHITECTURES
        for layout in LAYOUTS
    ],
)
def test_an_architecture_trains_or_is_refused(root: Path, name: str, layout: str, pytestconfig: pytest.Config) -> None:
    from transformers import AutoModelForCausalLM

    path = root / "saved"
    if dist.get_rank() == 0:
        hub_models.save(ARCHITECTURES[name], path)
    dist.barrier()
    tables = hub_models.job(root / "run", path, job={"steps": 2}, **LAYOUTS[layout])
    tables.pop("evaluation")
    try:
        check(RawJob(tables, {}, "job"), dist.get_world_size())
    except HpctrainError as error:
        verdict = str(error).splitlines()[-1]
    else:
        plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, experts_implementation="eager")
        expected = hub_models.trained_plainly(plain, tables)
        compare(train_here(tables).rows, expected, 1e-6, 1e-5)
        verdict = "trains"
    table = pytestconfig.getoption("--planned")
    if table is None:
        assert (verdict == "trains") == (tried()[name][layout] == "trains"), verdict
    elif dist.get_rank() == 0:
        with table.open("a") as file:
            file.write(json.dumps({"architecture": name, "layout": layout, "found": verdict}) + "\n")
