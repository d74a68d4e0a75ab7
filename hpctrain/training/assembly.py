"""Assembles a session: builds the model, opens the data, restores a checkpoint, and prints the resolved job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hpctrain.base.launcher_variables import launcher_name
from hpctrain.checking.check import CheckedJob
from hpctrain.checking.choices import refuse_machine
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.plugin import Machine
from hpctrain.model.build import Built, InitialValues, build_model
from hpctrain.model.gradients import GradientReducer
from hpctrain.model.mesh import Meshes, build_meshes, layout_of
from hpctrain.model.refusals import has_batch_norms
from hpctrain.ranks.json_collectives import gather_values
from hpctrain.training.deadline import deadline_of
from hpctrain.training.evaluation import is_compiled
from hpctrain.training.feed import Feed
from hpctrain.training.meters.meters import Meters, ModelFlops
from hpctrain.training.progress import Progress
from hpctrain.training.report import Report
from hpctrain.training.restoring import restore
from hpctrain.training.saving import open_store
from hpctrain.training.session import Session, memory_explained
from hpctrain.training.start import Start
from hpctrain.training.trained_model import TrainedModel

if TYPE_CHECKING:
    from hpctrain.training.guard.replicas import Replicas


def assemble(start: Start) -> Session:
    """The session that the loop works with. Collective."""
    return complete(start, build(start, start.checked))


def build(start: Start, checked: CheckedJob) -> TrainedModel:
    """The model of `checked`. Collective."""
    job, parts = checked.job, checked.parts
    with _building(start, checked) as meshes:
        return TrainedModel(job, parts, meshes, start.device, start.hooks)


def build_frozen(start: Start, checked: CheckedJob) -> tuple[Built, Meshes]:
    """A model without trained parameters, laid out as the job says. Collective."""
    job, parts, device = checked.job, checked.parts, start.device
    with _building(start, checked) as meshes:
        sums = GradientReducer(parts.compression, meshes)
        return build_model(job, parts, meshes, sums, device, InitialValues(), trains=False), meshes


@contextmanager
def _building(start: Start, checked: CheckedJob) -> Iterator[Meshes]:
    """A context for the building of a model, on the job's meshes."""
    job, parts, identity, device = checked.job, checked.parts, start.world.identity, start.device
    refuse_machine(job, parts, Machine(identity, device), checked.registry)
    start.hooks.refuse_differences()
    meshes = build_meshes(layout_of(job, parts, identity.size), device)
    lacking = memory_explained(job, parts, identity, device, "while the model was built", has_batch=False)
    with start.hooks.phase("build", 0), lacking:
        yield meshes


def complete(
    start: Start,
    model: TrainedModel,
    further: Mapping[str, TrainedModel] | None = None,
    states: Sequence[PluginState] = (),
    reads: bool = True,
    name: str | None = None,
) -> Session:
    """The session of a model: opens the data, restores a checkpoint. Collective.

    further: other models of a program, by their names. states: what it keeps in checkpoints itself. reads: whether it takes the
    job's data. name: of the model among others.
    """
    job, parts, identity, device = model.job, model.parts, start.world.identity, start.device
    hooks, layout, meshes = start.hooks, layout_of(job, parts, identity.size), model.meshes
    report = Report(identity, start.world.channel, job.checkpoint.keep_best, start.begin)
    feed = Feed(job, parts, meshes.data_rank, layout.data_ranks, identity.node, device, model.split)
    if job.guard.rolls_back:
        feed.refuse_stream()
    progress = Progress(feed.data.steps)
    flops = ModelFlops(
        copies=identity.size // layout.data_ranks,
        countable=not (job.compile.enabled or is_compiled(model.module)),
        is_forward=lambda: hooks.position.phase.startswith("forward"),
    )
    meters = Meters(device, parts.precision, gather_values(identity.node), meshes.groups(), flops)
    further = further or {}
    replicas: list[Replicas] = []
    if identity.size > 1:
        from hpctrain.training.guard.replicas import Replicas

        of_names = [(name, model), *further.items()]
        replicas = [
            Replicas(one.module, one.meshes, identity, its_name)
            for its_name, one in of_names if not one.parts.sharding.ranks_diverge
        ]  # fmt: skip
    told = hooks.call("hpctrain_state", job=job, identity=identity, model=model)
    session = Session(
        job, parts, identity, device, layout, hooks, report, model, feed,
        store=open_store(job, parts, device),
        replicas=replicas,
        deadline=deadline_of(job.job.time_limit, start.begin, identity),
        states=[*model.guard.state(), *told, *states],
        progress=progress, queries=start.queries,
        meters=meters, further=further,
    )  # fmt: skip
    with memory_explained(job, parts, identity, device, "while the optimizer's state was made", has_batch=False):
        restore(session, start.resume)
    model.refuse_optimizer()
    if job.job.epochs is not None and progress.step:  # the earlier run may have had another batch size
        progress.steps = progress.step + feed.steps_from(progress.samples_seen)
    for name, value in describe(session, reads).items():
        report.say(f"{name:<12} {value}")
    if progress.step:
        report.say(f"resuming     from step {progress.step} ({session.newest_checkpoint})")
        before, last, factor = progress.steps_before, progress.step - 1, parts.schedule.factor
        if before and not progress.done and factor(last, before) != factor(last, progress.steps):  # lr jumps here
            report.say(
                f"schedule     {parts.schedule.name} spans {progress.steps} steps now and spanned {before} before"
            )
    if layout.data_ranks > 1 and not job.model.sync_batch_norm and has_batch_norms(model.module):
        report.say("model        BatchNorm takes the means of each rank's micro batch, and other losses than one process; "
                   "[model] sync_batch_norm = true takes those of all ranks")  # fmt: skip
    report.open(job.output_dir, parts.loggers, progress.step)
    return session


def describe(session: Session, reads: bool) -> dict[str, str]:
    """The resolved job in a few lines. reads: whether it takes the job's data."""
    job, parts, identity, plan, model = session.job, session.parts, session.identity, session.feed.plan, session.model
    progress, everything, trained = session.progress, model.elements, model.trained_elements
    left = max(0, progress.steps - progress.step) * plan.samples_per_step
    epochs = session.feed.epochs(progress.samples_seen + left)
    threads = torch.get_num_threads()
    name = launcher_name() if identity.source == "mpi" else None
    launcher = f", started by {name}" if name else ""
    chosen = (parts.model, *([parts.dataset] if reads else []), parts.optimizer, parts.schedule)
    lines = {
        "job": f"{job.job.name}, seed {job.job.seed}, {progress.steps} steps, files in {job.output_dir}",
        "ranks": f"{identity.size} ({identity.source}){launcher}, {identity.local_size} per node, "
        f"{threads} thread{'s' if threads > 1 else ''} each, on {session.device.type}",
        "mesh": f"{session.layout}; sharding {parts.sharding.name}",
        "pipeline": model.runner.describe(plan.micro_batches),
        "batch": str(plan) if reads else None,
        "data": session.feed.describe(epochs) if reads else None,
        "loader": session.feed.data.training.remark if reads else None,
        "parameters": f"{everything:,}" + (f", {trained:,} trained" if trained != everything else ""),
        "precision": parts.precision.describe(session.device),
        "compression": model.sums.describe(),
        "plugins": ", ".join(plugin.name for plugin in chosen)
        + f", {parts.checkpoint.name} checkpoints, {parts.communicator.name} communicator",
    }
    return {name: text for name, text in lines.items() if text}
