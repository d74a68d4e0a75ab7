"""The order in which a rank runs the micro batches of a step: one after another, unless an axis brings a runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.base.devices import seed_draws
from hpctrain.base.errors import TrainingError
from hpctrain.base.random_numbers import derive_seed
from hpctrain.contracts.model import Batch, ModelSpec, trained_loss
from hpctrain.contracts.precision import LossScaler, Precision
from hpctrain.contracts.sharding import ShardedModel


@dataclass(frozen=True)
class MicroBatch:
    """Collated samples, the place of the first one in the global batch, and whether their loss counts.

    terms: `ModelSpec.count` of the batch before it moved to the device, so that no step waits for the number. flops:
    `ModelSpec.flops` of the batch before any axis cut it. load_seconds: the time of its loading, ahead of the step.
    """

    batch: Batch
    place: int
    counts: bool = True
    terms: int = 0
    flops: int | None = None
    load_seconds: float = 0.0


See = Callable[[Any, Batch], None]
"""A function that is called with outputs and their batch."""


@dataclass(frozen=True)
class RunnerParts:
    """The parts that a runner works with; `sharded.module` is ready to be trained.

    context: enter it around forward, loss and backward; once per micro batch, or around all of them.
    phase: enter it around the phases "forward" and "backward" of a step.
    named: call it with the numbers of each micro batch that rows report besides the loss.
    forwarded: call it with the step, outputs and batch of each forward in training, before the backward.
    compiled_loss: call it in place of `spec.loss`; None where nothing is compiled.
    """

    sharded: ShardedModel
    spec: ModelSpec
    precision: Precision
    scaler: LossScaler
    device: torch.device
    seed: int
    context: Callable[[], AbstractContextManager[None]]
    phase: Callable[[str, int], AbstractContextManager[None]] = lambda *_: nullcontext()
    forwarded: Callable[[int, Any, Batch], None] = lambda *_: None
    named: Callable[[Mapping[str, Tensor]], None] = lambda _: None
    compiled_loss: Callable[[Any, Batch], Any] | None = None

    @property
    def module(self) -> nn.Module:
        """The module as it lies on this rank."""
        return self.sharded.module

    def backward_from(self, loss: Tensor, divisor: float | Tensor) -> Tensor:
        """The tensor from which backward starts, where the step's losses are divided by `divisor`. Raises TrainingError for a
        loss without a graph."""
        if not torch.is_grad_enabled():
            why = "torch.set_grad_enabled(False) was called before the forward, by a hook or by the model, and not taken back"
            raise TrainingError(f"the loss has no gradient: {why}; use `with torch.no_grad():`")
        if not loss.requires_grad:
            raise TrainingError(
                f"[model] name = {self.spec.name!r}: its loss has no gradient, expected one that follows from trained parameters; "
                "look for detach(), item(), argmax or no_grad between the model's inputs and its loss"
            )
        divided = loss / divisor
        # without a scale, one operator less in each backward
        return divided if self.scaler.scale == 1 else divided * self.scaler.scale

    def seed_draws(self, step: int, micro: MicroBatch, stage: int = 0) -> None:
        """Seed random numbers by the place in the global batch, not by the rank: no random state needs saving.

        stage: of the model's parts on this rank; parts with equal draws would drop the same activations.
        """
        seed_draws(derive_seed(self.seed, step, micro.place, stage), self.device)

    def loss(self, outputs: Any, micro: MicroBatch) -> Tensor:
        """The sum of the losses, a plain scalar; call it under `precision.forward`. Raises TrainingError for other shapes."""
        result = (self.compiled_loss or self.spec.loss)(outputs, micro.batch)
        figures = dict(self.spec.figures(outputs, micro.batch))
        trained = trained_loss(result)
        if isinstance(result, Mapping) and trained is not result:
            figures |= {name: self._scalar(loss, f" {name!r}") for name, loss in result.items() if name != "loss"}
        losses = trained if isinstance(trained, Mapping) else {}
        losses = {f"loss_{name}": self._scalar(loss, f" {name!r}") for name, loss in losses.items()}
        if micro.counts:  # a micro batch that only fills up is in no row
            self.named({**losses, **figures})
        whole = torch.stack(list(losses.values())).sum() if losses else self._scalar(trained, "")
        return whole if micro.counts else whole * 0  # the backward still runs: its collectives need every rank

    def _scalar(self, loss: object, which: str) -> Tensor:
        if isinstance(loss, Tensor) and loss.dim() == 0:
            return loss.full_tensor() if isinstance(loss, DTensor) else loss
        fault = f"has the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"is {type(loss).__name__}"
        raise TrainingError(
            f"[model] name = {self.spec.name!r}: its loss{which} {fault}, expected a scalar: the sum over what `count` counts"
        )


class Runner(ABC):
    """Runs forwards and backwards. The trainer's loop never calls a model itself."""

    @abstractmethod
    def train(self, micro_batches: list[MicroBatch], divisor: float | Tensor, step: int) -> Tensor:
        """Forward and backward of every micro batch; the sum of this rank's losses, a float64 scalar on the device.

        Gradients are of (sum of losses) / `divisor`, a number or a scalar on the device, summed over the micro batches. Calls
        `sharded.begin` before the forward of each micro batch, or once before all of them where their forwards and backwards
        interleave.
        """

    def figures(self) -> Sequence[float]:
        """This rank's numbers from the last `train`, for `metrics`; the same number of them on every rank."""
        return ()

    def metrics(self, figures: Tensor) -> tuple[dict[str, float], str]:
        """Combine all ranks' `figures`, (ranks, figures), into metrics of the step and a remark for the screen."""
        return {}, ""

    @abstractmethod
    def evaluate(self, micro_batches: Iterable[MicroBatch], see: See) -> tuple[Tensor, int]:
        """The sum of this rank's losses, a float64 scalar on the device, and the number of `terms` in it (0 where another rank of
        the axis has them).

        see: called with outputs and batch of each micro batch that counts, on ranks that have the outputs.
        """

    def idle_share(self, micro_batches: int) -> float:
        """The share of a step of `micro_batches` micro batches in which, by the schedule, a rank waits for others of the axis."""
        return 0.0

    def describe(self, micro_batches: int) -> str | None:
        """A line about how `micro_batches` micro batches are run, for the screen."""
        return None
