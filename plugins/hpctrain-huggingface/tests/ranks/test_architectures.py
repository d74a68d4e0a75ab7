"""Which architectures train in which layout: each has the losses of a plain loop on what from_pretrained gives, or is refused.

architectures_table.py makes docs/lab/architectures.md of it.
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

LAYOUTS: dict[str, dict[str, Any]] = {
    "stage 0": {},
    "stage 3": {"sharding": {"stage": 3}},
    "tensor": {"parallelism": {"tensor": 2}},
    "pipeline": {"parallelism": {"pipeline": 2}},
    "context": {"parallelism": {"context": 2}},
}


@pytest.mark.usefixtures("world")
@pytest.mark.shown_on(2)
@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ARCHITECTURES)
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
    if table is not None and dist.get_rank() == 0:
        with table.open("a") as file:
            file.write(json.dumps({"architecture": name, "layout": layout, "found": verdict}) + "\n")
