"""What is trained: the model as it lies on this rank, the sums of its gradients, and its optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.contracts.model import Batch
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.runner import Runner, RunnerParts
from hpctrain.errors import UsageError
from hpctrain.exchange import sum_of
from hpctrain.gradients.reducer import GradientReducer
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.loop.runner import PlainRunner
from hpctrain.loop.totals import PieceTotals
from hpctrain.mesh import Meshes
from hpctrain.model.build import build_model
from hpctrain.model.groups import parameter_groups
from hpctrain.model.updates import updates_parts_alike
from hpctrain.plugins.life_cycle import LifeCycle
from hpctrain.torch_private import foreach_mul_


class TrainedModel:
    """The module, its pieces on this rank, and what steps them.

    elements, trained_elements: of the whole model's parameters. optimizer_begun: whether the optimizer has taken a step;
    until then it has no state. loss_share: what of this rank's loss counts, where several ranks compute the same one.
    """

    def __init__(
        self, job: Job, parts: Parts, meshes: Meshes, node: str, device: torch.device, hooks: LifeCycle
    ) -> None:
        """Build it; collective. `node`: this rank's name of it."""
        self._job, self._parts, self._hooks = job, parts, hooks
        self._batch_group = meshes.batch_group()
        self.sums = GradientReducer(parts.compression, meshes.data, node)
        built = build_model(job, parts, meshes, self.sums, device)
        self.sharded, self.module, self.tied = built.sharded, built.sharded.module, built.tied
        self.scaler = parts.precision.start()
        self.axes, self._trained = built.axes, list(built.trained)
        self.elements, self.trained_elements = built.elements, sum(map(prod, built.trained.values()))
        axes = [plugin.traits for plugin in parts.parallelism.values()]
        apart = tuple(one.axis for one in axes if one.ranks_have == "other parameters")
        self.pieces = [replace(piece, axes=(*apart, *piece.axes)) for piece in self.sharded.pieces()]
        self.totals = PieceTotals(self.pieces, meshes.model)
        self.optimizer, self.optimizer_begun = self.new_optimizer(), False
        self._base_rates = [group["lr"] * self._rate_factor() for group in self.optimizer.param_groups]
        self.runner = self._make_runner(device)
        repeated = [one.axis for one in axes if one.ranks_have == "the same samples"]
        self.loss_share = 0.0 if any(meshes.axis(axis).get_local_rank() for axis in repeated) else 1.0

    def _make_runner(self, device: torch.device) -> Runner:
        """The one that an axis brings, or the plain one."""

        @contextmanager
        def context() -> Iterator[None]:
            with ExitStack() as stack:
                for axis in self.axes:
                    stack.enter_context(axis.context())
                yield

        parts, seed = self._parts, self._job.job.seed
        mine = RunnerParts(
            self.sharded, parts.model, parts.precision, self.scaler, device, seed, context, self._hooks.phase
        )
        brought = [runner for axis in self.axes if (runner := axis.runner(mine)) is not None]
        return brought[0] if brought else PlainRunner(mine)

    def split(self, batch: Batch) -> Batch:
        """This rank's part of a micro batch."""
        for axis in self.axes:
            batch = axis.split_batch(batch)
        return batch

    def new_optimizer(self) -> torch.optim.Optimizer:
        """One without state, in place of the one before."""
        return self.sharded.optimizer(self._groups(), self._parts.optimizer.build)

    def spare_optimizer(self) -> torch.optim.Optimizer:
        """One beside the one that trains."""
        return self._parts.optimizer.build(self._groups())

    def _groups(self) -> list[dict[str, Any]]:
        return parameter_groups(self.pieces, self._trained, self._parts.optimizer_groups)

    def refuse_optimizer(self) -> None:
        """UsageError for an optimizer that can't update the part of a parameter that a rank holds; collective."""
        cut = sum_of(sum(piece.tensor.shape != piece.shape for piece in self.pieces))
        if cut and not updates_parts_alike(self._parts.optimizer.build):
            raise UsageError(
                f"[optimizer] name = {self._parts.optimizer.name!r} looks at all of a parameter to update it, and ranks hold parts "
                "of some: it would train something else; use another optimizer, such as adamw, or [sharding] stage 0 without "
                "tensor parallelism",
                everywhere=True,
            )

    def _rate_factor(self) -> float:
        """How lr grows with the batch: linear (Goyal et al., 2017) or by its root (Krizhevsky, 2014)."""
        table = self._job.optimizer
        if table.lr_reference_batch is None:
            return 1.0
        ratio = self._job.batch.size / table.lr_reference_batch
        return float(ratio if table.lr_scaling == "linear" else ratio**0.5)

    def consolidate(self) -> None:
        """One model is evaluated and saved. What forwards wrote into buffers (BatchNorm's means), each rank of its own samples,
        becomes the first data-parallel rank's. Collective."""
        self.sharded.consolidate()
        if self._batch_group.size() == 1:
            return
        for name, buffer in self.module.named_buffers():
            mine = Piece.of(name, buffer).tensor
            mine.data = mine.contiguous()
            # as bytes: not every backend knows every dtype, and a mask is bool
            dist.broadcast(mine.data.view(-1).view(torch.uint8), group_src=0, group=self._batch_group)

    def sum_over_batch(self, value: int) -> int:
        """The sum over the ranks that hold different parts of the global batch."""
        return sum_of(value, self._batch_group)

    def begin_sums(self, step: int) -> None:
        """Tell the sums of gradients what those of `step` are multiplied by, and whether it may be left out."""
        may_be_left_out = self.scaler.skips_nonfinite or self._job.job.on_nonfinite == "continue"
        self.sums.begin(step, self.scaler.scale, may_be_left_out)

    def take_gradients(self) -> list[torch.Tensor]:
        """The gradients of this rank's pieces, without the loss scale."""
        gradients = [piece.tensor.grad for piece in self.pieces if piece.tensor.grad is not None]
        assert len(gradients) == len(self.pieces)  # what ShardedModel.synchronize promises
        if gradients and self.scaler.scale != 1:  # a rank may hold nothing
            foreach_mul_(gradients, 1.0 / self.scaler.scale)
        return gradients

    def gradient_norm(self, gradients: list[torch.Tensor]) -> float:
        """The norm of the whole model's gradient, equal on all ranks; collective where pieces differ between ranks."""
        return self.totals.norm(gradients)

    def set_learning_rate(self, step: int, steps: int) -> float:
        """Give each group its rate for this step of `steps`; the first group's."""
        factor = self._parts.schedule.factor(step, steps)
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor
        return float(self._base_rates[0] * factor)
