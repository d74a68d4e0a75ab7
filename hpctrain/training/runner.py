"""Runs the micro batches of one step on one rank's module, one after the other. Its loss may be compiled."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from hpctrain.contracts.model import Batch, ModelSpec
from hpctrain.contracts.runner import MicroBatch, Runner, RunnerParts, See
from hpctrain.training.guard.memory import lack_of_memory

LOG = logging.getLogger("hpctrain")


class CompiledLoss:
    """The model's loss, compiled where its outputs are one tensor: float32 copies of logits, several times their memory, come and
    go in registers."""

    def __init__(self, spec: ModelSpec, mode: str) -> None:
        self._spec, self._compiled = spec, torch.compile(spec.loss, mode=mode)
        self._works = True

    def __call__(self, outputs: Any, batch: Batch) -> Any:
        """The loss as `ModelSpec.loss` gives it. A loss that can't be compiled runs as it is."""
        if type(outputs) is not Tensor or not self._works:
            return self._spec.loss(outputs, batch)
        try:
            return self._compiled(outputs, batch)
        except Exception as error:
            if lack_of_memory(error) is not None:
                raise
            found = self._spec.loss(outputs, batch)  # its own error tells more than the compiler's
            self._works = False
            why = (str(error).strip() or type(error).__name__).splitlines()[0]
            LOG.warning(
                "[compile]: the loss of the model %r can't be compiled and runs as it is: %s", self._spec.name, why
            )
            return found


class PlainRunner(Runner):
    """Forward and backward of one micro batch, then of the next."""

    def __init__(self, parts: RunnerParts) -> None:
        self._parts = parts
        self._modules = list(parts.module.modules())

    def train(self, micro_batches: list[MicroBatch], divisor: float | Tensor, step: int) -> Tensor:
        parts = self._parts
        if not all(one.training for one in self._modules):  # sets an attribute of each, which takes longer than a look
            parts.module.train()
        losses = []
        for i, micro in enumerate(micro_batches):
            parts.sharded.begin(last=i == len(micro_batches) - 1)
            losses.append(self._train_on(micro, divisor, step).double())
        return reduce(torch.add, losses)

    def _train_on(self, micro: MicroBatch, divisor: float | Tensor, step: int) -> Tensor:
        """Forward and backward of one micro batch; its loss."""
        parts = self._parts
        parts.seed_draws(step, micro)
        with parts.context():
            with parts.phase("forward", step):
                loss = self._loss(micro, step)
            with parts.phase("backward", step):
                parts.backward_from(loss, divisor).backward()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch], see: See) -> tuple[Tensor, int]:
        parts = self._parts
        parts.module.eval()
        total, count = torch.zeros((), dtype=torch.float64, device=parts.device), 0
        for micro in micro_batches:
            with parts.context(), parts.precision.forward(parts.device):
                outputs = parts.spec.forward(parts.module, micro.batch)
                loss = parts.loss(outputs, micro)
                if micro.counts:
                    see(outputs, micro.batch)
            if micro.counts:
                total += loss
                count += micro.terms
        return total, count

    def _loss(self, micro: MicroBatch, step: int) -> Tensor:
        parts = self._parts
        with parts.precision.forward(parts.device):
            outputs = parts.spec.forward(parts.module, micro.batch)
            parts.forwarded(step, outputs, micro.batch)
            return parts.loss(outputs, micro)
