"""8-bit AdamW under the sharding stages: blocks are cut from what each rank holds."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain import Step, batches_of, gpt_loss, module_of, train_plainly
from test_stages import compare
from training import job, own_device, train_here

pytestmark = pytest.mark.usefixtures("world")

OPTIMIZER = {"name": "adamw-8bit", "lr": 0.01, "weight_decay": 0.1}
BOUND = 5e-4
"""Relative, on losses, under every stage: a sum in another order may change an 8-bit code. 6e-5 was seen."""


def tables_of(root, stage: int) -> dict[str, Any]:
    tables = job(job={"output_dir": str(root), "steps": 6}, sharding={"stage": stage}, optimizer=OPTIMIZER)
    tables["model"] |= {"hidden_size": 64, "layers": 1}
    return tables


@functools.lru_cache
def _plain(text: str) -> list[Step]:
    from torchao.optim import AdamW8bit

    tables = json.loads(text)
    module = module_of(tables, torch.float32)
    optimizer = AdamW8bit(module.parameters(), lr=OPTIMIZER["lr"], weight_decay=OPTIMIZER["weight_decay"])
    with torch.compiler.set_stance("force_eager"):
        return train_plainly(
            module, optimizer, (functools.partial(gpt_loss, module, *batch) for batch in batches_of(tables))
        )


@pytest.mark.cases(nightly=["0"], rest="thorough")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_near_one_process(root, stage: int) -> None:
    if dist.get_world_size() != 2:
        pytest.skip("importing torchao takes each rank seconds: on 2 ranks only")
    if own_device().type == "sim":
        pytest.skip("the compiler makes no kernels for it")
    rows = train_here(tables_of(root, stage)).rows
    compare(rows, _plain(json.dumps(tables_of(".", 0))), losses=BOUND, norms=10 * BOUND)
