"""The model on this rank in training, with its gradient sums and its optimizer."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.devices import draws_state, seed_draws
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.base.random_numbers import derive_seed
from hpctrain.base.torch_private import foreach_mul_
from hpctrain.checkpoint.finding import refuse_other_source
from hpctrain.checkpoint.state import group_options, model_pieces
from hpctrain.contracts.model import Batch
from hpctrain.contracts.optimization import MatrixOptimizer, WholeTensors
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.plugin import broken
from hpctrain.contracts.runner import Runner, RunnerParts
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.model.build import InitialValues, build_model, source_of
from hpctrain.model.gradients import GradientReducer
from hpctrain.model.mesh import Meshes
from hpctrain.model.parameters import EACH_WHOLE, build_optimizer, has_modes, parameter_groups
from hpctrain.model.trials import Build, refuse_hidden_state, updates_parts_alike
from hpctrain.ranks.json_collectives import gather_values, share, sum_of, world_group
from hpctrain.registry.life_cycle import LifeCycle
from hpctrain.registry.user_code.reference import is_reference
from hpctrain.training.figures import NamedLosses
from hpctrain.training.guard.judging import Guard
from hpctrain.training.over_ranks import FullParameters, PieceTotals
from hpctrain.training.runner import CompiledLoss, PlainRunner


class TrainedModel:
    """The module, its pieces on this rank, and the optimizer that updates them.

    elements, trained_elements: of the full model's parameters. optimizer_begun: whether the optimizer has taken a step;
    before that it has no state. loss_share: the weight of this rank's loss: 0 if another rank counts the same loss.
    """

    def __init__(
        self,
        job: Job,
        parts: Parts,
        meshes: Meshes,
        device: torch.device,
        hooks: LifeCycle,
        values: InitialValues | None = None,
    ) -> None:
        """Builds the model. Collective. values: None for those of the seed."""
        values = values or InitialValues()
        self.job, self.parts, self._hooks, self.meshes = job, parts, hooks, meshes
        self.spec, self.guard = parts.model, Guard(job.guard)
        self.batch_group = meshes.batch_group()
        self._has_forwarded, self.device = False, device
        self.remark = ""
        """A sentence for the user about the loss, once it was tried in the first forward."""
        self._own_axes = {own for _, own in meshes.own_groups}
        self.sums = GradientReducer(parts.compression, meshes)
        built = build_model(job, parts, meshes, self.sums, device, values)
        self.sharded, self.module, self.tied = built.sharded, built.sharded.module, built.tied
        self.scaler = parts.precision.start()
        self.axes, self.shapes, self.given = built.axes, built.trained, built.given
        self.elements, self.trained_elements = built.elements, sum(map(prod, built.trained.values()))
        axes = [plugin.traits for plugin in parts.parallelism.values()]
        apart = tuple(one.axis for one in axes if one.ranks_have == "other parameters")  # which no DTensor says
        self.pieces = [replace(piece, axes=(*apart, *piece.axes)) for piece in self.sharded.pieces()]
        self.totals = PieceTotals(self.pieces, meshes)
        self._whole = FullParameters(self.pieces, self.shapes, meshes, device)
        # the step of the newest update, and the number of updates of this step before it
        self._drawn = -1, 0
        axes_of_pieces = {piece.axes for piece in self.pieces}
        self._may_draw = not sum_of(len(axes_of_pieces) > 1)
        self._part = [meshes.axis(axis).get_local_rank() for axis in sorted(set().union(*axes_of_pieces))]
        self.optimizer, self.optimizer_begun = self.new_optimizer(), False
        self.group_options = group_options(self.optimizer)
        self._base_rates = [group["lr"] for group in self.optimizer.param_groups]
        repeated = [one.axis for one in axes if one.ranks_have == "the same samples"]
        again = any(meshes.axis(axis).get_local_rank() for axis in repeated)  # the first rank counts the loss of all
        self.loss_share = 0.0 if again else 1.0
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

        parts, seed, compile_ = self.parts, self.job.job.seed, self.job.compile
        compiled_loss = CompiledLoss(parts.model, compile_.mode) if compile_.enabled else None
        mine = RunnerParts(
            self.sharded, parts.model, parts.precision, self.scaler, device, seed, context, self._hooks.phase,
            self._forwarded, self.named_losses.add, compiled_loss,
        )  # fmt: skip
        brought = [runner for axis in self.axes if (runner := axis.runner(mine)) is not None]
        return brought[0] if brought else PlainRunner(mine)

    def split(self, batch: Batch) -> Batch:
        """This rank's part of a micro batch."""
        for axis in self.axes:
            batch = axis.split_batch(batch)
        return batch

    def _forwarded(self, step: int, outputs: Any, batch: Batch) -> None:
        """A forward of the training is done."""
        if not self._has_forwarded and is_reference(self.parts.model.name):
            from hpctrain.registry.user_code.model import try_loss  # here: a plugin's model needs none of it

            self.remark = try_loss(self.parts.model, outputs, batch, self.device)
        self._has_forwarded = True
        self._hooks.forwarded(step, outputs, batch)

    def new_optimizer(self) -> torch.optim.Optimizer:
        """An optimizer without state that replaces the previous one."""
        self.mode = "train"
        build: Build = self._build
        if isinstance(self.parts.optimizer, MatrixOptimizer):
            from hpctrain.model.whole import OwnedTensors  # which no other optimizer needs

            build = partial(self._build, whole=OwnedTensors(self.sharded.pieces(), self.meshes, self.device))
        return self.sharded.optimizer(self._groups(self.pieces), build)

    def _switch(self, mode: str) -> None:
        """Let an optimizer that has modes change the pieces to those for training or for all else. Collective."""
        if self.mode != mode and has_modes(self.optimizer):
            getattr(self.optimizer, mode)()  # schedule-free optimizers evaluate at other values than they train at
            self.refresh()
        self.mode = mode

    def spare_optimizer(self, pieces: Sequence[Piece]) -> torch.optim.Optimizer:
        """A second optimizer over this rank's pieces, for the shapes of its state."""
        return self._build(self._groups(pieces))

    def update(self, step: int, gradients: list[torch.Tensor], norm: float) -> None:
        """Clip, let the optimizer update the pieces, and give the ranks the new parameters. norm: of the gradients. Collective."""
        limit = self.job.optimizer.clip_norm
        if limit is not None:
            clip(gradients, norm, limit)
        self._step(step)
        self.sharded.refresh()
        self.sharded.stepped(step + 1)  # counted from 1 for strategies that act at intervals

    def _step(self, step: int) -> None:
        """The optimizer's step. What it draws follows from the step, and is equal where ranks hold the same pieces.

        Raises ContractError for draws where ranks hold parts of some parameters and the same values of others, which would differ
        from then on.
        """
        self._drawn = step, self._drawn[1] + 1 if self._drawn[0] == step else 0
        seed_draws(derive_seed(self.job.job.seed, "optimizer", *self._drawn, *self._part), self.device)
        before = None if self._may_draw else draws_state(self.device)
        self.optimizer.step()
        if before is not None and draws_state(self.device) != before:
            raise broken(
                self.parts.optimizer, "draws random numbers in its step",
                "none in a layout with tensor parallelism, pipelines or experts: ranks would draw other numbers for values that "
                "they share",
            )  # fmt: skip
        self.optimizer_begun = True

    def _build(self, groups: list[dict[str, Any]], whole: WholeTensors = EACH_WHOLE) -> torch.optim.Optimizer:
        return build_optimizer(self.parts.optimizer, groups, whole)

    def _groups(self, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
        return parameter_groups(pieces, self.shapes, self.parts.optimizer_groups)

    def refuse_optimizer(self) -> None:
        """Raises UsageError if the optimizer can't update a part of a parameter by itself. Collective."""
        refuse_hidden_state(self.parts.optimizer, self._build)
        cut = sum_of(sum(piece.tensor.shape != piece.shape for piece in self.pieces))
        if cut and not isinstance(self.parts.optimizer, MatrixOptimizer) and not updates_parts_alike(self._build):
            raise UsageError(
                f"[optimizer] name = {self.parts.optimizer.name!r} needs a whole parameter to update it, but ranks hold parts "
                "of some: the result would be wrong; use another optimizer, such as adamw, [sharding] stage 0 without tensor "
                "parallelism, or make it a MatrixOptimizer"
            )

    def load(self, weights: Path, kept_by: str | None = None, strict: bool = True) -> list[str]:
        """Take the values of a checkpoint or a file of weights. Collective; returns and raises what `load_weights` does."""
        from hpctrain.checkpoint.weights import load_weights  # few jobs take any

        group = world_group()
        share(group, lambda: refuse_other_source(weights, self.parts.formats, self.source()))
        pieces = model_pieces(self.module, self.pieces, self.shapes, self.given)
        told = load_weights(weights, self.parts.formats, pieces, group, self.tied, kept_by, strict)
        self.refresh()
        return told

    def source(self) -> str:
        """The fingerprint of where the model's given values come from, which checkpoints leave out; "" without such."""
        return source_of(self.spec, self.job.job.seed, self.given)

    def refresh(self) -> None:
        """Bring the module up to date after values of the pieces were changed. Collective."""
        self.sharded.refresh()

    def value(self, name: str) -> torch.Tensor:
        """A copy of the full value of a trained parameter. Collective."""
        return self._whole.of(name, lambda piece: piece.tensor)

    def gradient(self, name: str) -> torch.Tensor:
        """A copy of the full gradient of a trained parameter after a step, zeros where a loop has dropped it. Collective."""
        return self._whole.of(name, Piece.gradient)

    @property
    def place(self) -> dict[str, tuple[int, int]]:
        """This rank's place on each axis of the mesh, and the axis's size; outermost first."""
        ranks = self.meshes.ranks
        return {axis: (ranks[axis].get_local_rank(), ranks[axis].size()) for axis in ranks.mesh_dim_names or ()}

    @property
    def groups(self) -> dict[str, dist.ProcessGroup]:
        """The groups of several ranks by the names of their axes, in the same order on all ranks."""
        return self.meshes.groups()

    def consolidate(self) -> None:
        """Copy the buffers that forwards changed (BatchNorm's means) from the first data-parallel rank to the others, so that
        all ranks evaluate and save one model. Collective."""
        self.sharded.consolidate()
        self._switch("eval")
        if self.batch_group.size() == 1:
            return
        for name, buffer in self.module.named_buffers():
            piece = Piece.of(name, buffer)
            if self._own_axes & set(piece.axes):
                continue  # each rank of such an axis has a part of its own
            mine = piece.tensor
            mine.data = mine.contiguous()  # a view of bytes needs it
            # as bytes: not every backend knows every dtype, and a mask is bool
            dist.broadcast(mine.data.view(-1).view(torch.uint8), group_src=0, group=self.batch_group)

    def begin_sums(self, step: int, may_be_left_out: bool = False) -> None:
        """Tell the gradient sums the loss scale of `step`, and whether it may be left out, by the caller or here."""
        may_be_left_out = may_be_left_out or self.scaler.skips_nonfinite or self.job.guard.may_leave_out
        self._switch("train")
        self.sums.begin(step, self.scaler.scale, may_be_left_out)

    def route(self) -> float:
        """A number made of the blocks that have run in this step, equal on ranks that ran the same."""
        return float(zlib.crc32("/".join(self.sharded.ran).encode()))  # 32 bits, which a float64 holds

    def refuse_other_routes(self, routes: Sequence[float]) -> None:
        """Raises TrainingError on all ranks if ranks that gather parameters together ran different blocks; clears the record.
        routes: of all ranks. Collective where they differ."""
        if len(set(routes)) > 1:
            from hpctrain.training.guard.replicas import parted

            cut = {axis for piece in self.pieces for axis in piece.axes}
            copies = [axis for axis in self.meshes.data_axes if axis not in cut]
            place = [self.meshes.axis(axis).get_local_rank() for axis in copies]
            told: list[tuple[list[int], list[str]]] = gather_values((place, list(self.sharded.ran)))
            for group in {tuple(where): where for where, _ in told}.values():
                why = parted({rank: ran for rank, (where, ran) in enumerate(told) if where == group})
                if why is not None:
                    raise TrainingError(why)
        self.sharded.ran.clear()

    def take_gradients(self) -> list[torch.Tensor]:
        """The gradients of this rank's pieces, without the loss scale."""
        # each piece has one after `synchronize`, zeros where the loss did not reach it
        gradients = [piece.tensor.grad for piece in self.pieces if piece.tensor.grad is not None]
        if gradients and self.scaler.scale != 1:  # a rank may hold no pieces
            foreach_mul_(gradients, 1.0 / self.scaler.scale)
        return gradients

    def set_learning_rate(self, step: int, steps: int) -> None:
        """Set each group's learning rate for this step, or epoch, of `steps`."""
        factor = self.parts.schedule.factor(step, steps)
        if not isinstance(factor, Real) or not 0 <= float(factor) < math.inf:
            told = f"gave the factor {factor!r} for step {step}"
            raise broken(self.parts.schedule, told, "a number that is zero or more")
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor


def clip(gradients: list[torch.Tensor], norm: float, limit: float) -> None:
    """Scale all gradients so that their global norm is at most `limit` (Pascanu et al., 2013)."""
    if gradients and norm > limit:
        foreach_mul_(gradients, limit / norm)
