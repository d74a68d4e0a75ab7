"""The model on this rank in training, with its gradient sums and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.checkpoint.state import model_pieces
from hpctrain.checkpoint.weights import load_weights
from hpctrain.contracts.model import Batch
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.runner import Runner, RunnerParts
from hpctrain.errors import UsageError
from hpctrain.exchange import sum_of
from hpctrain.gradients.reducer import GradientReducer
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.loop.named_losses import NamedLosses
from hpctrain.loop.runner import PlainRunner
from hpctrain.loop.totals import PieceTotals
from hpctrain.loop.whole import WholeTensors
from hpctrain.mesh import Meshes
from hpctrain.model.build import build_model
from hpctrain.model.groups import build_optimizer, parameter_groups
from hpctrain.model.updates import updates_parameters, updates_parts_alike
from hpctrain.plugins.life_cycle import LifeCycle
from hpctrain.torch_private import foreach_mul_


class TrainedModel:
    """The module, its pieces on this rank, and the optimizer that updates them.

    elements, trained_elements: of the full model's parameters. optimizer_begun: whether the optimizer has taken a step;
    before that it has no state. loss_share: the weight of this rank's loss: 0 if another rank counts the same loss.
    """

    def __init__(
        self, job: Job, parts: Parts, meshes: Meshes, node: str, device: torch.device, hooks: LifeCycle
    ) -> None:
        """Builds the model. Collective. node: this rank's node, for messages."""
        self._job, self._parts, self._hooks = job, parts, hooks
        self.batch_group = meshes.batch_group()
        self._own_axes = {own for _, own in meshes.own_groups}
        self.sums = GradientReducer(parts.compression, meshes, node)
        built = build_model(job, parts, meshes, self.sums, device)
        self.sharded, self.module, self.tied = built.sharded, built.sharded.module, built.tied
        self.scaler = parts.precision.start()
        self.axes, self.shapes = built.axes, built.trained
        self.elements, self.trained_elements = built.elements, sum(map(prod, built.trained.values()))
        axes = [plugin.traits for plugin in parts.parallelism.values()]
        apart = tuple(one.axis for one in axes if one.ranks_have == "other parameters")
        self.pieces = [replace(piece, axes=(*apart, *piece.axes)) for piece in self.sharded.pieces()]
        self.totals = PieceTotals(self.pieces, meshes)
        self._whole = WholeTensors(self.pieces, self.shapes, meshes, device)
        self.optimizer, self.optimizer_begun = self.new_optimizer(), False
        self._base_rates = [group["lr"] * self._rate_factor() for group in self.optimizer.param_groups]
        repeated = [one.axis for one in axes if one.ranks_have == "the same samples"]
        self.loss_share = 0.0 if any(meshes.axis(axis).get_local_rank() for axis in repeated) else 1.0
        self.named_losses = NamedLosses(self.loss_share)
        self.runner = self._make_runner(device)

    def _make_runner(self, device: torch.device) -> Runner:
        """The runner that an axis brings, or the plain runner."""

        @contextmanager
        def context() -> Iterator[None]:
            with ExitStack() as stack:
                for axis in self.axes:
                    stack.enter_context(axis.context())
                yield

        parts, seed = self._parts, self._job.job.seed
        mine = RunnerParts(
            self.sharded, parts.model, parts.precision, self.scaler, device, seed, context, self._hooks.phase,
            self._hooks.forwarded, self.named_losses.add,
        )  # fmt: skip
        brought = [runner for axis in self.axes if (runner := axis.runner(mine)) is not None]
        return brought[0] if brought else PlainRunner(mine, survives=self._job.guard.oom == "skip")

    def split(self, batch: Batch) -> Batch:
        """This rank's part of a micro batch."""
        for axis in self.axes:
            batch = axis.split_batch(batch)
        return batch

    def new_optimizer(self) -> torch.optim.Optimizer:
        """An optimizer without state that replaces the previous one."""
        return self.sharded.optimizer(self._groups(), partial(build_optimizer, self._parts.optimizer))

    def spare_optimizer(self) -> torch.optim.Optimizer:
        """An optimizer besides the one that trains."""
        return build_optimizer(self._parts.optimizer, self._groups())

    def _groups(self) -> list[dict[str, Any]]:
        return parameter_groups(self.pieces, list(self.shapes), self._parts.optimizer_groups)

    def refuse_optimizer(self) -> None:
        """Raises UsageError if the optimizer updates nothing, or can't update a part of a parameter by itself. Collective."""
        if not updates_parameters(self._parts.optimizer):
            raise UsageError(
                f"[optimizer] name = {self._parts.optimizer.name!r}: two of its steps on random gradients changed nothing, expected "
                "`step` to update each parameter that has a gradient",
                everywhere=True,
            )
        cut = sum_of(sum(piece.tensor.shape != piece.shape for piece in self.pieces))
        if cut and not updates_parts_alike(self._parts.optimizer):
            raise UsageError(
                f"[optimizer] name = {self._parts.optimizer.name!r} needs a whole parameter to update it, but ranks hold parts "
                "of some: the result would be wrong; use another optimizer, such as adamw, or [sharding] stage 0 without "
                "tensor parallelism",
                everywhere=True,
            )

    def _rate_factor(self) -> float:
        """The factor by which lr grows with the batch: linear (Goyal et al., 2017) or square root (Krizhevsky, 2014)."""
        table = self._job.optimizer
        if table.lr_reference_batch is None:
            return 1.0
        ratio = self._job.batch.size / table.lr_reference_batch
        return float(ratio if table.lr_scaling == "linear" else ratio**0.5)

    def load(
        self, weights: Path, group: dist.ProcessGroup, kept_by: str | None = None, strict: bool = True
    ) -> list[str]:
        """Take the values of a checkpoint or a file of weights. Collective; returns and raises what `load_weights` does."""
        pieces = model_pieces(self.module, self.pieces)
        told = load_weights(weights, self._parts.formats, pieces, group, self.tied, kept_by, strict)
        self.refresh()
        return told

    def refresh(self) -> None:
        """Bring the module up to date after values of the pieces were changed. Collective."""
        self.sharded.refresh()

    def value(self, name: str) -> torch.Tensor:
        """A copy of the full value of a trained parameter. Collective."""
        return self._whole.of(name, lambda piece: piece.tensor)

    def gradient(self, name: str) -> torch.Tensor:
        """A copy of the full gradient of a trained parameter after a step. Collective."""

        def gradient_of(piece: Piece) -> torch.Tensor:
            found = piece.tensor.grad
            assert found is not None  # ShardedModel.synchronize guarantees it
            return found

        return self._whole.of(name, gradient_of)

    def consolidate(self) -> None:
        """Copy the buffers that forwards changed (BatchNorm's means) from the first data-parallel rank to the others, so that
        all ranks evaluate and save one model. Collective."""
        self.sharded.consolidate()
        if self.batch_group.size() == 1:
            return
        for name, buffer in self.module.named_buffers():
            piece = Piece.of(name, buffer)
            if self._own_axes & set(piece.axes):
                continue  # each rank of such an axis has a part of its own
            mine = piece.tensor
            mine.data = mine.contiguous()
            # as bytes: not every backend knows every dtype, and a mask is bool
            dist.broadcast(mine.data.view(-1).view(torch.uint8), group_src=0, group=self.batch_group)

    def sum_over_batch(self, value: int) -> int:
        """The sum over the ranks that hold different parts of the global batch."""
        return sum_of(value, self.batch_group)

    def begin_sums(self, step: int) -> None:
        """Tell the gradient sums the loss scale of `step`, and whether the step may be skipped."""
        may_be_left_out = self.scaler.skips_nonfinite or self._job.guard.may_leave_out
        self.sums.begin(step, self.scaler.scale, may_be_left_out)

    def take_gradients(self) -> list[torch.Tensor]:
        """The gradients of this rank's pieces, without the loss scale."""
        gradients = [piece.tensor.grad for piece in self.pieces if piece.tensor.grad is not None]
        assert len(gradients) == len(self.pieces)  # ShardedModel.synchronize guarantees it
        if gradients and self.scaler.scale != 1:  # a rank may hold no pieces
            foreach_mul_(gradients, 1.0 / self.scaler.scale)
        return gradients

    def gradient_norm(self, gradients: list[torch.Tensor]) -> float:
        """The norm of the full gradient, equal on all ranks. Collective if pieces differ between ranks."""
        return self.totals.norm(gradients)

    def set_learning_rate(self, step: int, steps: int) -> float:
        """Set each group's learning rate for this step of `steps`; return the first group's."""
        factor = self._parts.schedule.factor(step, steps)
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor
        return float(self._base_rates[0] * factor)
