"""The common part of the GPU tests: a small job, its training, and the plain torch loop to compare with."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import Step, batches_of, gpt_loss, module_of, train_plainly
from torch import Tensor, nn

import hpctrain
from hpctrain.base.devices import device_of_rank, is_accelerator

DEVICE = device_of_rank(0)
COMMUNICATOR = "nccl"

needs_gpu = pytest.mark.skipif(not is_accelerator(DEVICE), reason="there is no GPU that torch can use")

SMALL: dict[str, Any] = {
    "job": {"name": "small", "steps": 8, "seed": 11},
    # multiples of 16 everywhere, for float8 products
    "model": {
        "name": "gpt", "hidden_size": 64, "layers": 2, "attention_heads": 4, "vocab_size": 256, "max_seq_length": 32,
    },
    "dataset": {"name": "synthetic", "samples": 500},
    "optimizer": {"name": "adamw", "lr": 0.003, "weight_decay": 0.1},
    "batch": {"global_size": 16, "micro_size": 8},
    "precision": {"mode": "fp32"},
    "communicator": {"name": COMMUNICATOR},
}  # fmt: skip
SGD = {"name": "sgd", "lr": 0.3, "momentum": 0.9, "clip_norm": 0.2}
"""AdamW hides a wrongly scaled gradient, SGD shows it; the clip binds."""
AT_ONCE = {"global_size": 16, "micro_size": 16}
"""One forward per step, as in the plain loop, so that products have the same shapes."""

SAME_DEVICE = 2e-5
"""The largest deviation of a float32 loss from the plain loop's on the same GPU, relative, over all steps."""
OTHER_DEVICE = 1e-4
"""The same from the CPU's loss: other kernels add in another order."""


def job(output: Path, **tables: dict[str, Any]) -> dict[str, Any]:
    """SMALL with `tables` merged in, and its files in `output`. A table with another name replaces the original."""
    made: dict[str, Any] = json.loads(json.dumps(SMALL))
    for name, table in tables.items():
        other = table.get("name") not in (None, made.get(name, {}).get("name"))
        made[name] = dict(table) if other else {**made.get(name, {}), **table}
    made["job"]["output_dir"] = str(output)
    return made


def trained(tables: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps' rows of metrics.jsonl, after training in this process."""
    gc.collect()
    if is_accelerator(DEVICE):
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
    assert hpctrain.run(tables)["exit_code"] == 0
    steps = [row for row in rows_of(tables) if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, tables["job"]["steps"] + 1))
    return steps


def rows_of(tables: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows of metrics.jsonl."""
    text = (Path(tables["job"]["output_dir"]) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(rows: list[dict[str, Any]]) -> list[float]:
    return [row["loss"] for row in rows]


def plain(
    tables: dict[str, Any],
    device: torch.device = DEVICE,
    forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    convert: Callable[[nn.Module], object] = lambda module: None,
) -> tuple[nn.Module, list[Step]]:
    """Train the job in a plain torch loop: the module, losses and gradient norms. Optimizers are neither fused nor foreach.

    forward: entered around forward and loss. convert: changes the module before it is moved to `device`.
    """
    module = module_of(tables, torch.float32)
    convert(module)
    module.to(device)
    options = {key: value for key, value in tables["optimizer"].items() if key not in ("name", "clip_norm")}
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[tables["optimizer"]["name"]]
    optimizer = kind(module.parameters(), **options, fused=False, foreach=False)
    made = (partial(_loss, module, forward, *batch) for batch in batches_on(tables, device))
    return module, train_plainly(module, optimizer, made, tables["optimizer"].get("clip_norm"))


def batches_on(tables: dict[str, Any], device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """ids and labels of each step, on `device`."""
    return ((ids.to(device), labels.to(device)) for ids, labels in batches_of(tables))


def _loss(module: nn.Module, forward: Callable[[], AbstractContextManager[Any]], ids: Tensor, labels: Tensor) -> Tensor:
    with forward():
        return gpt_loss(module, ids, labels)


def compare(rows: list[dict[str, Any]], steps: list[Step], bound: float) -> None:
    """Check relative bounds: `bound` on losses, ten times as much on gradient norms."""
    expected, norms = zip(*steps, strict=True)
    assert losses(rows) == pytest.approx(expected, rel=bound)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=10 * bound)
