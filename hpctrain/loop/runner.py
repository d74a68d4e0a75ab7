"""Runs the micro batches of one step on one rank's module, one after the other."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hpctrain.contracts.runner import MicroBatch, Runner, RunnerParts


class PlainRunner(Runner):
    """Forward and backward of one micro batch, then of the next."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts

    def train(self, micro_batches: list[MicroBatch], divisor: int, step: int) -> Tensor:
        parts = self._parts
        parts.module.train()
        total = torch.zeros((), dtype=torch.float64, device=parts.device)
        for i, micro in enumerate(micro_batches):
            parts.sharded.begin(last=i == len(micro_batches) - 1)
            parts.seed_draws(step, micro)
            with parts.context():
                with parts.phase("forward", step):
                    loss = self._loss(micro)
                with parts.phase("backward", step):
                    parts.backward_from(loss, divisor).backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> tuple[Tensor, int]:
        parts = self._parts
        parts.module.eval()
        total, count = torch.zeros((), dtype=torch.float64, device=parts.device), 0
        for micro in micro_batches:
            with parts.context():
                loss = self._loss(micro)
            if micro.counts:
                total += loss
                count += parts.spec.count(micro.batch)
        return total, count

    def _loss(self, micro: MicroBatch) -> Tensor:
        parts = self._parts
        with parts.precision.forward(parts.device):
            return parts.loss(parts.spec.forward(parts.module, micro.batch), micro)
