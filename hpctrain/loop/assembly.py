"""Puts a session together: builds the model, opens the data, restores, and says on the screen what came of the job."""

from __future__ import annotations

import torch

from hpctrain.checking.check import CheckedJob
from hpctrain.checking.choices import refuse_machine
from hpctrain.contracts.life_cycle import Control
from hpctrain.contracts.plan import Machine
from hpctrain.loop.feed import Feed
from hpctrain.loop.progress import Progress
from hpctrain.loop.report import Report
from hpctrain.loop.saving import Saving
from hpctrain.loop.session import Session
from hpctrain.loop.trained_model import TrainedModel
from hpctrain.mesh import Layout, build_meshes, layout_of
from hpctrain.plugins.life_cycle import LifeCycle
from hpctrain.world.meeting import World, threads_per_rank


def assemble(checked: CheckedJob, world: World, device: torch.device, resume: str, hooks: LifeCycle) -> Session:
    """Everything that the loop needs; collective. `resume` is "auto", "never" or a path."""
    job, parts, identity = checked.job, checked.parts, world.identity
    refuse_machine(job, parts, Machine(identity, device), checked.registry)
    layout = layout_of(job, parts, identity.size)
    meshes = build_meshes(layout, device)
    report = Report(identity, world.channel)
    with hooks.phase("build", 0):
        model = TrainedModel(job, parts, meshes, identity.node, device, hooks)
    feed = Feed(job, parts, meshes.data_rank, layout.data_ranks, identity.node, device, model.split)
    progress = Progress(feed.steps)
    saving = Saving(job, parts, identity, hooks, layout, model, feed, progress, report)
    saving.restore(resume)
    model.refuse_optimizer()
    if job.job.epochs is not None and progress.step:  # the batch may have been another one until now
        progress.steps = progress.step + feed.steps_from(progress.samples_seen)
    session = Session(job, parts, hooks, identity, device, progress, model, feed, report, saving, Control())
    for name, value in describe(session, layout).items():
        report.say(f"{name:<12} {value}")
    if progress.step:
        report.say(f"resuming     from step {progress.step} ({saving.newest})")
    report.open(job.output_dir, parts.loggers, progress.step)
    return session


def describe(session: Session, layout: Layout) -> dict[str, str]:
    """The resolved job in a few lines."""
    job, parts, identity, plan, model = session.job, session.parts, session.identity, session.feed.plan, session.model
    progress, everything, trained = session.progress, model.elements, model.trained_elements
    pipeline = model.runner.describe(plan.micro_batches)
    left = max(0, progress.steps - progress.step) * plan.samples_per_step
    epochs = (progress.samples_seen + left) / session.feed.samples
    compression = model.sums.describe()
    threads = threads_per_rank(identity)
    chosen = (parts.model, parts.dataset, parts.optimizer, parts.schedule)
    return {
        "job": f"{job.job.name}, seed {job.job.seed}, {progress.steps} steps, files in {job.output_dir}",
        "ranks": f"{identity.size} ({identity.source}), {identity.local_size} per node, "
        f"{threads} thread{'s' if threads > 1 else ''} each, on {session.device.type}",
        "mesh": f"{layout}; sharding {parts.sharding.name}",
        **({"pipeline": pipeline} if pipeline else {}),
        "batch": str(plan),
        "data": f"{session.feed.samples:,} samples, {epochs:.2f} epochs",
        "parameters": f"{everything:,}" + (f", {trained:,} trained" if trained != everything else ""),
        "precision": parts.precision.describe(session.device),
        **({"compression": compression} if compression else {}),
        "plugins": ", ".join(plugin.name for plugin in chosen)
        + f", {parts.checkpoint.name} checkpoints, {parts.communicator.name} communicator",
    }
