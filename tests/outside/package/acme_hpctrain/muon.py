"""Muon (Jordan et al., 2024): updates a matrix by its momentum, made orthogonal; groups with method = "adamw" by AdamW."""

from __future__ import annotations

from typing import Literal

import torch

from hpctrain.api import Field, MatrixOptimizer, OptimizerOptions, hookimpl


class MuonOptions(OptimizerOptions):
    method: Literal["muon", "adamw"] = Field(default="muon", description='"adamw" for a group of vectors or embeddings')
    momentum: float = Field(default=0.95, ge=0, lt=1, description="decay of the sum of the gradients; beta2 of AdamW")
    weight_decay: float = Field(default=0.1, ge=0, description="share of a weight that is taken off, times lr")
    iterations: int = Field(default=5, ge=1, description="Newton-Schulz iterations")


def orthogonal(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """A matrix with the singular vectors of `matrix`, and singular values near 1."""
    flat = matrix.flatten(1) if matrix.dim() > 1 else matrix[None]
    tall = len(flat) > flat.shape[1]
    x = flat.T if tall else flat
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    scale = max(1, len(flat) / flat.shape[1]) ** 0.5
    return ((x.T if tall else x) * scale).view_as(matrix)


class Muon(torch.optim.Optimizer):
    def __init__(self, groups, whole):
        super().__init__(groups, {})
        self._whole = whole

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            update = self._adamw if group["method"] == "adamw" else self._muon
            for p, change in zip(params, update(group, params), strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=group["lr"])

    def _muon(self, group, params):
        sums = [self.state[p].setdefault("sum", torch.zeros_like(p)) for p in params]
        for p, value in zip(params, sums, strict=True):
            value.mul_(group["momentum"]).add_(p.grad)
        return self._whole.map(params, sums, lambda matrix: orthogonal(matrix, group["iterations"]))

    def _adamw(self, group, params):
        for p in params:
            state = self.state[p]
            mean = state.setdefault("sum", torch.zeros_like(p))
            square = state.setdefault("square", torch.zeros_like(p))
            state["steps"] = steps = state.get("steps", 0) + 1
            mean.lerp_(p.grad, 0.1)
            square.lerp_(p.grad.square(), 1 - group["momentum"])
            unbiased = (square / (1 - group["momentum"] ** steps)).sqrt()
            yield mean / (1 - 0.9**steps) / (unbiased + 1e-8)


class MuonPlugin(MatrixOptimizer):
    """Muon."""

    name = "muon"
    Options = MuonOptions

    def build_whole(self, groups, whole):
        return Muon(groups, whole)


@hookimpl
def hpctrain_optimizer():
    return [MuonPlugin]
