"""Everything that the loop works with, put together once before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from typing import Any

import pluggy
import torch
import torch.distributed as dist

from hpctrain.contracts.dataset import Lengths, Samples
from hpctrain.contracts.model import Batch
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.runner import Runner, RunnerParts
from hpctrain.data.loader import Loader
from hpctrain.data.opening import make_padding, make_plan, open_data, steps_of_epochs
from hpctrain.data.plan import BatchPlan
from hpctrain.data.tokens import TokenPlan
from hpctrain.errors import EnvironmentUnfitError, UsageError
from hpctrain.gradients.sums import GradientSums
from hpctrain.job.check import CheckedJob
from hpctrain.loop.console import Console
from hpctrain.loop.records import Records
from hpctrain.loop.runner import PlainRunner
from hpctrain.loop.saving import Saving
from hpctrain.loop.totals import PieceTotals
from hpctrain.mesh import DATA_AXES, build_meshes, layout_of
from hpctrain.model.build import build_model
from hpctrain.model.groups import parameter_groups
from hpctrain.model.updates import updates_parts_alike
from hpctrain.world.meeting import World


class Session:
    """One job on this rank. Attributes are what the loop reads; `step` and `samples_seen` are what `advance` changes."""

    def __init__(self, checked: CheckedJob, world: World, device: torch.device, resume: str) -> None:
        """Build the model, open the data and restore; collective. `resume` is "auto", "never" or a path."""
        self.job, self.parts, self.world, self.device = checked.job, checked.parts, world, device
        self.hooks: pluggy.HookRelay = checked.registry.manager.hook
        self.console = Console(world.identity, world.front)
        self._build()
        self._open_data()
        self.step, self.samples_seen, self.samples_before = 0, 0, 0  # before: at the beginning of the newest step
        self.evaluation: tuple[int, float] | None = None  # step and loss of the newest one
        self.optimizer_begun = False  # whether it has taken a step; until then it has no state
        self.saving = Saving(self)
        self.saving.restore(resume)
        self._refuse_parts()
        self.first_step = self.step
        if self.job.job.epochs is not None and self.step:  # the batch may have been another one until now
            self.steps = self.step + self._steps_left()
        self._open_outputs()

    # ------------------------------------------------------------------ putting together

    def _build(self) -> None:
        job, parts = self.job, self.parts
        why = parts.precision.unfit(self.device)
        if why is not None:
            raise EnvironmentUnfitError(f"[precision] mode = {parts.precision.name!r}: {why}")
        self.layout = layout_of(job, parts, self.world.identity.size)
        self.meshes = build_meshes(self.layout, self.device)
        self._batch_group = self.meshes.batch_group()
        self.sums = GradientSums(parts.compression, self.meshes.model[DATA_AXES], self.world.identity.node)
        built = build_model(job, parts, self.meshes, self.sums, self.device)
        self.module, self.tied, self._trained = built.module, built.tied, list(built.trained)
        self.elements, self.trained_elements = built.elements, sum(map(prod, built.trained.values()))
        apart = tuple(plugin.axis for plugin in parts.parallelism.values() if plugin.splits_module)
        self.pieces = [replace(piece, axes=(*apart, *piece.axes)) for piece in parts.sharding.pieces()]
        self.totals = PieceTotals(self.pieces, self.meshes.model)
        self.optimizer = self.new_optimizer()
        self._base_rates = [group["lr"] * self._rate_factor() for group in self.optimizer.param_groups]
        self.runner = self._make_runner()
        repeated = [plugin.axis for plugin in parts.parallelism.values() if plugin.repeats_loss]
        self.loss_share = 0.0 if any(self.meshes.axis(axis).get_local_rank() for axis in repeated) else 1.0

    def _make_runner(self) -> Runner:
        """The one that an axis brings, or the plain one."""
        job, parts = self.job, self.parts
        axes = list(parts.parallelism.values())

        @contextmanager
        def context() -> Iterator[None]:
            with ExitStack() as stack:
                for plugin in axes:
                    stack.enter_context(plugin.context())
                yield

        mine = RunnerParts(
            self.module, parts.model, parts.precision, parts.sharding, self.device, job.job.seed, context
        )
        brought = [runner for plugin in axes if (runner := plugin.runner(mine)) is not None]
        return brought[0] if brought else PlainRunner(mine)

    def new_optimizer(self) -> torch.optim.Optimizer:
        """One without state."""
        groups = parameter_groups(self.pieces, self._trained, self.parts.optimizer_groups)
        return self.parts.sharding.optimizer(groups, self.parts.optimizer.build)

    def _refuse_parts(self) -> None:
        """UsageError for an optimizer that can't update the part of a parameter that a rank holds; collective."""
        cut = self.total(sum(piece.tensor.shape != piece.shape for piece in self.pieces))
        if cut and not updates_parts_alike(self.parts.optimizer.build):
            raise UsageError(
                f"[optimizer] name = {self.parts.optimizer.name!r} looks at all of a parameter to update it, and ranks hold parts "
                "of some: it would train something else; use another optimizer, such as adamw, or [sharding] stage 0 without "
                "tensor parallelism",
                everywhere=True,
            )

    def _rate_factor(self) -> float:
        """How lr grows with the batch: linear (Goyal et al., 2017) or by its root (Krizhevsky, 2014)."""
        table = self.job.optimizer
        if table.lr_reference_batch is None:
            return 1.0
        ratio = self.job.batch.size / table.lr_reference_batch
        return float(ratio if table.lr_scaling == "linear" else ratio**0.5)

    def _open_data(self) -> None:
        job = self.job
        data = open_data(job, self.parts)
        self.training, self.validation, self.steps, self.fingerprint, self._order = (
            data.training,
            data.validation,
            data.steps,
            data.fingerprint,
            data.order,
        )
        self._compare_fingerprints()
        self.plan = self._make_plan(data.lengths)
        self._lengths, self._validation_lengths = data.lengths, data.validation_lengths
        self._padding = make_padding(job, self.parts)

    def _steps_left(self) -> int:
        """Of the job's epochs, from here on."""
        return steps_of_epochs(self.job, len(self.training), self._order, self._lengths, self.samples_seen)

    def _make_plan(self, lengths: Lengths | None) -> BatchPlan | TokenPlan:
        return make_plan(self.job, self.parts, lengths, self.meshes.data_rank, self.layout.data_ranks)

    def _compare_fingerprints(self) -> None:
        everyone: list[Any] = [None] * self.world.identity.size
        dist.all_gather_object(everyone, (self.fingerprint, self.world.identity.node))
        different = sorted({f"{node} ({found})" for found, node in everyone if found != everyone[0][0]})
        if different:
            raise EnvironmentUnfitError(
                f"the dataset {self.job.dataset.name!r} is not the same on all nodes: {everyone[0][1]} ({everyone[0][0]}), "
                f"but {', '.join(different)}; give all nodes the same files"
            )

    # ------------------------------------------------------------------ what the loop asks for

    def advance(self, samples_seen: int) -> None:
        """A step is done; the next one begins at this position in the order of the samples."""
        self.step += 1
        self.samples_before, self.samples_seen = self.samples_seen, samples_seen

    def agree_on_buffers(self) -> None:
        """What forwards wrote into buffers (BatchNorm's means), each rank of its own samples, becomes the first data-parallel
        rank's: one model is evaluated and saved. Collective."""
        if self._batch_group.size() == 1:
            return
        for name, buffer in self.module.named_buffers():
            mine = Piece.of(name, buffer).tensor
            mine.data = mine.contiguous()
            # as bytes: not every backend knows every dtype, and a mask is bool
            dist.broadcast(mine.data.view(-1).view(torch.uint8), group_src=0, group=self._batch_group)

    def training_loader(self) -> Loader:
        """The micro batches from here to the last step."""
        plan = self.plan.training(self._order, self.samples_seen, self.steps - self.step)
        return self._loader(self.training, plan)

    def validation_loader(self) -> Loader:
        """This rank's part of the evaluation."""
        assert self.validation is not None
        plan, samples = self._make_plan(self._validation_lengths), len(self.validation)
        return self._loader(self.validation, plan.evaluation(samples, self.job.evaluation.batches))

    def _loader(self, samples: Samples, plan: Iterator[Any]) -> Loader:
        table, dtype = self.job.dataset, self.parts.precision.parameter_dtype
        return Loader(samples, plan, self._split, table.workers, table.prefetch, self.device, dtype, self._padding)

    def _split(self, batch: Batch) -> Batch:
        """This rank's part of a micro batch."""
        for plugin in self.parts.parallelism.values():
            batch = plugin.split_batch(batch)
        return batch

    def sum_over_batch(self, value: int) -> int:
        """The sum over the ranks that hold different parts of the global batch."""
        return self.total(value, self._batch_group)

    def total(self, value: int, group: dist.ProcessGroup | None = None) -> int:
        """The sum over the ranks of `group`, all ranks by default."""
        total = torch.tensor(value, dtype=torch.int64)
        dist.all_reduce(total, group=group)
        return int(total)

    def begin_sums(self) -> None:
        """Tell the sums of gradients what this step's are multiplied by, and whether it may be left out."""
        precision = self.parts.precision
        scale = precision.scale(torch.ones((), dtype=torch.float64)).item()
        may_be_left_out = precision.skips_nonfinite or self.job.job.on_nonfinite == "continue"
        self.sums.begin(self.step, scale, may_be_left_out)

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of this rank's pieces."""
        gradients = [piece.tensor.grad for piece in self.pieces]
        assert all(gradient is not None for gradient in gradients)  # what Sharding.synchronize promises
        return gradients  # type: ignore[return-value]

    def gradient_norm(self) -> float:
        """The norm of the whole model's gradient, equal on all ranks; collective where pieces differ between ranks."""
        return self.totals.norm(self.gradients())

    def set_learning_rate(self) -> float:
        """Give each group its rate for this step; the first group's."""
        factor = self.parts.schedule.factor(self.step, self.steps)
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor
        return float(self._base_rates[0] * factor)

    # ------------------------------------------------------------------ what people see

    def _open_outputs(self) -> None:
        self.console.layout(self)
        if self.world.identity.rank == 0:
            self._records = Records(self.job.output_dir, self.parts.loggers, self.step)

    def report(self, row: Mapping[str, Any]) -> None:
        """A row of metrics to the file, the loggers and the screen."""
        if self.world.identity.rank == 0:
            self._records.write(row)
            self.console.progress(row, self.steps, self.parts.model.counts)

    def say(self, message: str) -> None:
        """A line on rank 0's screen."""
        self.console.line(message)

    def close(self) -> None:
        """End what runs beside the loop, and close what rank 0 writes to."""
        self.sums.close()
        self.console.close()
        if self.world.identity.rank == 0:
            self._records.close()
