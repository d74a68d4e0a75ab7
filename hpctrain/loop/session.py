"""Everything that the loop works with, put together once before the first step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pluggy
import torch
import torch.distributed as dist

from hpctrain.checkpoint.retention import EVALUATION_LOSS
from hpctrain.checkpoint.state import (
    COMPRESSION,
    compression_pieces,
    create_state,
    model_pieces,
    optimizer_numbers,
    restore_numbers,
    restore_quantized,
    state_pieces,
)
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.weights import load_weights
from hpctrain.contracts.dataset import Lengths, Samples
from hpctrain.contracts.model import Batch
from hpctrain.contracts.pieces import Piece, State
from hpctrain.contracts.runner import Runner, RunnerParts
from hpctrain.data.loader import Loader
from hpctrain.data.opening import make_padding, make_plan, open_data
from hpctrain.data.plan import BatchPlan
from hpctrain.data.tokens import TokenPlan
from hpctrain.errors import CheckpointError, EnvironmentUnfitError
from hpctrain.gradients.sums import GradientSums
from hpctrain.job.check import CheckedJob
from hpctrain.loop.console import Console
from hpctrain.loop.metrics import MetricsFile
from hpctrain.loop.runner import PlainRunner
from hpctrain.loop.totals import PieceTotals
from hpctrain.mesh import DATA_AXES, build_meshes, layout_of
from hpctrain.model.build import build_model
from hpctrain.model.groups import parameter_groups
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
        self.step, self.samples_seen, self._samples_before = 0, 0, 0
        self.newest_checkpoint: Path | None = None
        self.saving = 0  # the step of the newest save in the background
        self.evaluation: tuple[int, float] | None = None  # step and loss of the newest one
        self._restore(resume)
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
        self.module, self._trained = built.module, list(built.trained)
        self.elements, self.trained_elements = built.elements, sum(map(prod, built.trained.values()))
        apart = tuple(plugin.axis for plugin in parts.parallelism.values() if plugin.splits_module)
        self.pieces = [replace(piece, axes=(*apart, *piece.axes)) for piece in parts.sharding.pieces()]
        self._totals = PieceTotals(self.pieces, self.meshes.model)
        self._make_optimizer()
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

    def _make_optimizer(self) -> None:
        groups = parameter_groups(self.pieces, self._trained, self.parts.optimizer_groups)
        self.optimizer = self.parts.sharding.optimizer(groups, self.parts.optimizer.build)

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
        self._validation_lengths = data.validation_lengths
        self._padding = make_padding(job, self.parts)

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

    # ------------------------------------------------------------------ checkpoints

    def _restore(self, resume: str) -> None:
        table = self.job.checkpoint
        world_group = dist.group.WORLD
        assert world_group is not None
        background = dist.new_group() if table.asynchronous else None
        root = self.job.output_dir.absolute() / "checkpoints"
        self._store = CheckpointStore(
            root, self.parts.checkpoint, self.parts.formats, table.keep, world_group, background,
            table.keep_every, table.keep_best,
        )  # fmt: skip
        restored, pieces = None, list[Piece]()
        if resume != "never":
            create_state(self.optimizer)
            path = None if resume == "auto" else Path(resume)
            pieces = self._state_pieces()
            restored = self._store.restore(pieces, path, optional=(COMPRESSION,))
        if restored is None:
            self._begin_anew()
            return
        if restored.values["fingerprint"] != self.fingerprint:
            raise CheckpointError(
                f"{restored.path} was trained on other data (dataset fingerprint {restored.values['fingerprint']}, found "
                f"{self.fingerprint}); restore the data, or start anew in another output_dir"
            )
        self.step, self.samples_seen = restored.step, int(restored.values["samples_seen"])
        self.parts.precision.restore(restored.values["precision"])
        restore_quantized(self.pieces, self.optimizer, pieces)
        restore_numbers(self.pieces, self.optimizer, restored.values["optimizer_numbers"])
        self.parts.sharding.refresh()
        self.newest_checkpoint = self._shown(restored.path)
        self._tell_of_absent(restored.absent)

    def _state_pieces(self) -> list[Piece]:
        """All of a checkpoint's tensors on this rank."""
        return [
            *state_pieces(self.module, self.pieces, self.optimizer),
            *compression_pieces(self.sums.pieces()),
        ]

    def _tell_of_absent(self, names: list[str]) -> None:
        """What compression remembers may not be in the checkpoint: that was saved without, or with another."""
        count = self._total(len(names))
        if count:
            self.say(
                f"compression  {count} of its tensors are not in {self.newest_checkpoint}; they begin as in a new run"
            )

    def _begin_anew(self) -> None:
        self._make_optimizer()
        weights = self.job.model.weights
        if weights is not None:
            group = dist.group.WORLD
            assert group is not None
            load_weights(weights, self.parts.formats, model_pieces(self.module, self.pieces), group)
            self.parts.sharding.refresh()

    def advance(self, samples_seen: int) -> None:
        """A step is done; the next one begins at this position in the order of the samples."""
        self.step += 1
        self._samples_before, self.samples_seen = self.samples_seen, samples_seen

    def is_save_due(self) -> bool:
        """Whether the job asks for a checkpoint of this step."""
        table = self.job.checkpoint
        if table.every_steps and self.step % table.every_steps == 0:
            return True
        period = table.every_epochs * len(self.training)
        return period > 0 and self.samples_seen // period > self._samples_before // period

    def save(self, final: bool) -> None:
        """Save this step, in the background where the job says so and training goes on (it isn't `final`)."""
        values = {
            "samples_seen": self.samples_seen,
            "fingerprint": self.fingerprint,
            "precision": self.parts.precision.state(),
            "optimizer_numbers": self._totals.merged(optimizer_numbers(self.pieces, self.optimizer)),
            "job": self.job.job.name,
            "layout": self.layout.axes,
        }
        if self.evaluation is not None and self.evaluation[0] == self.step:
            values[EVALUATION_LOSS] = self.evaluation[1]
        self.sums.settle()
        state = State(self._state_pieces(), values)
        if self.job.checkpoint.asynchronous and not final:
            self._store.save_in_background(self.step, state)
            self.saving = self.step
        else:
            self._saved(self._store.save(self.step, state), self.step)

    def is_saving_over(self) -> bool:
        """Whether a save in the background has ended on all ranks, well or not."""
        return self._store.is_over()

    def finish_saving(self) -> None:
        """Wait for a save in the background, raising its error."""
        path = self._store.finish()
        if path is not None:
            self._saved(path, self.saving)

    def _saved(self, path: Path, step: int) -> None:
        self.newest_checkpoint = self._shown(path)
        self.hooks.hpctrain_checkpoint_saved(step=step, path=path)

    def _shown(self, path: Path) -> Path:
        """As a person at rank 0 would type it."""
        return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

    # ------------------------------------------------------------------ what the loop asks for

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
        return self._total(value, self._batch_group)

    def _total(self, value: int, group: dist.ProcessGroup | None = None) -> int:
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
        return self._totals.norm(self.gradients())

    def set_learning_rate(self) -> float:
        """Give each group its rate for this step; the first group's."""
        factor = self.parts.schedule.factor(self.step, self.steps)
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor
        return float(self._base_rates[0] * factor)

    # ------------------------------------------------------------------ what people see

    def _open_outputs(self) -> None:
        self.console.layout(self)
        if self.world.identity.rank:
            return
        self._metrics = MetricsFile(self.job.output_dir / "metrics.jsonl", self.step)
        for logger in self.parts.loggers:
            logger.open(self.job.output_dir, self.step)

    def report(self, row: Mapping[str, Any]) -> None:
        """A row of metrics to the file, the loggers and the screen."""
        if self.world.identity.rank:
            return
        self._metrics.write(dict(row))
        for logger in self.parts.loggers:
            logger.log(row)
        self.console.progress(row, self.steps)

    def say(self, message: str) -> None:
        """A line on rank 0's screen."""
        self.console.line(message)

    def close(self) -> None:
        """Close what rank 0 writes to."""
        self.console.close()
        if self.world.identity.rank == 0:
            self._metrics.close()
            for logger in self.parts.loggers:
                logger.close()
