"""A small classifier for `Training`, and a loop of torch's own to hold it against."""

from __future__ import annotations

from typing import Any

import torch
from hpctrain_ray import Learner
from torch import nn
from torch.nn.functional import cross_entropy


def made(**tables: Any) -> dict[str, Any]:
    """The job, with tables in place of its own."""
    return {"job": {"name": "outside", "steps": 100, "output_dir": "out"}, "checkpoint": {"every_steps": 2}, **tables}


def learner() -> type[Learner]:
    """A class that its pickle carries: the workers can't import this module."""

    class Points(Learner):
        def setup(self, loop: Any) -> None:
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
            self.model, self.optimizer = loop.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))

        def loss(self, batch: Any) -> torch.Tensor:
            points, labels = batch
            if points.isnan().any():
                raise ValueError("these are no points")
            return cross_entropy(self.model(points), labels)

    return Points


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step: points (8, 2) and labels (8,)."""
    points = torch.randn(8, 2, generator=torch.Generator().manual_seed(step))
    return points, (points.prod(1) > 0).long()


def plain(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses and weights of a loop of torch's in this process."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        points, labels = batch(step)
        loss = cross_entropy(net(points), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, net.state_dict()
