"""A data set with augmentation trains on any number of ranks as in one process."""

from __future__ import annotations

from typing import Any

import drawn
import pytest
import torch
import torch.distributed as dist
from modules import built
from torch.nn.functional import cross_entropy
from training import train_here

from hpctrain.base.draws import Draws
from hpctrain.data.order import SampleOrder
from hpctrain.registry.user_code.dataset import UserDataset

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.ranks(2)]


@pytest.mark.thorough
def test_augmentation_is_that_of_one_process(root) -> None:
    tables: dict[str, Any] = {
        "job": {"name": "drawn", "steps": 10, "seed": 9, "output_dir": str(root)},
        "model": {"name": "drawn:model", "loss": "torch.nn.functional:cross_entropy"}, "dataset": {"name": "drawn:samples"},
        "optimizer": {"name": "sgd", "lr": 0.1}, "batch": {"global_size": 24, "micro_size": 24 // dist.get_world_size() // 2},
        "precision": {"mode": "fp32"},
    }  # fmt: skip
    rows = train_here({**tables, "job": {**tables["job"], "steps": 6}}).rows + train_here(tables).rows
    module = built(tables, drawn.model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    opened = UserDataset("drawn:samples", {}).open("train", None)  # type: ignore[arg-type]
    assert opened is not None
    order, losses = SampleOrder(50, 9, opened.fingerprint()), []
    draws = Draws(9, opened)
    for step in range(10):
        positions = range(24 * step, 24 * (step + 1))
        batch = []
        for index, position in zip(order.at(positions.start, positions.stop).tolist(), positions, strict=True):
            batch += draws.of([(index, position)], lambda index, _: opened[index])
        inputs, labels = torch.stack([one for one, _ in batch]), torch.stack([label for _, label in batch])
        loss = cross_entropy(module(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=3e-6)


@pytest.mark.thorough
@pytest.mark.shown_on(2)
def test_each_step_of_a_pipeline_draws_anew_and_so_does_a_resume(root) -> None:
    """At this rate the model stays as it is, and all samples are alike: only the dropout changes the loss."""
    tables: dict[str, Any] = {
        "job": {"name": "dropping", "steps": 4, "seed": 9, "output_dir": str(root / "whole")},
        "model": {"name": "drawn:dropping", "loss": "torch.nn.functional:cross_entropy"}, "dataset": {"name": "drawn:alike"},
        "optimizer": {"name": "sgd", "lr": 1e-30}, "batch": {"global_size": 12, "micro_size": 3},
        "precision": {"mode": "fp64"}, "parallelism": {"pipeline": 2},
    }  # fmt: skip
    whole = [row["loss"] for row in train_here(tables).rows]
    assert len(set(whole)) == 4, whole
    cut = {**tables, "job": {**tables["job"], "output_dir": str(root / "cut")}}
    first = train_here({**cut, "job": {**cut["job"], "steps": 2}}).rows
    assert [row["loss"] for row in first + train_here(cut).rows] == whole
