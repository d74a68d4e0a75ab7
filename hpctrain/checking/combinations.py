"""Finds parts of a job that are valid alone but not together, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm, prod

from hpctrain.contracts.model import AttentionModel, PackedModel, PaddedModel
from hpctrain.contracts.plan import Plan
from hpctrain.data.shapes import axis_of_one_shape
from hpctrain.job.parts import Parts
from hpctrain.job.problems import PlacedProblem, collecting
from hpctrain.job.tables import Job
from hpctrain.job.toml import Key
from hpctrain.model.parameters import refuse_unmatched, trained_names
from hpctrain.model.refusals import (
    refuse_batch_norms,
    refuse_embeddings,
    refuse_unsaved_buffers,
    refuse_untrained,
)
from hpctrain.registry.user_code import is_reference

Problems = Iterator[PlacedProblem]


def combination_problems(job: Job, parts: Parts, plan: Plan) -> list[PlacedProblem]:
    """The core's objections to the job. If `plan` has a layout, the layout and the batch are checked, too."""
    return [
        *_of_evaluation(job),
        *_of_hooks(job),
        *_of_guards(job),
        *_of_model(job, parts, plan),
        *_of_axes(job, parts),
        *_of_dataset(job),
        *_of_epochs(job, parts),
        *_of_tokens(job, parts),
        *_of_compiling(job, plan),
        *(_of_layout(job, parts, plan.data_ranks) if plan.data_ranks is not None else ()),
    ]


def _of_evaluation(job: Job) -> Problems:
    """Keys that need evaluations, in a job that has none or too few."""
    best: Key = ("checkpoint", "keep_best")
    if job.evaluation.enabled:
        why = None if job.checkpoint.keep_best is None else _lack_of_best(job)
        if why is not None:
            yield PlacedProblem.at(best, why)
        return
    why = "it needs evaluations; expected [evaluation] every_steps or every_epochs, found none"
    for i, table in enumerate(job.metric):
        yield PlacedProblem(("metric", i), f"[[metric]] name = {table.name!r}: {why}")
    if job.checkpoint.keep_best is not None:
        yield PlacedProblem.at(best, why)


def _lack_of_best(job: Job) -> str | None:
    """The reason why no step but the last, which always stays, is both evaluated and saved; None where one is."""
    saved, evaluated, steps = job.checkpoint, job.evaluation, job.job.steps
    if not (saved.every_steps or saved.every_epochs):
        return "only the last step is saved; expected [checkpoint] every_steps or every_epochs, found none"
    if saved.every_epochs or evaluated.every_epochs or steps is None:
        return None  # the steps of an epoch are not known yet
    is_short = steps <= max(saved.every_steps, evaluated.every_steps)  # a trial of a longer job: its last step is both
    if is_short or lcm(saved.every_steps, evaluated.every_steps) < steps:
        return None
    return (
        f"no step of {steps} but the last is both evaluated (every {evaluated.every_steps} steps) and saved (every "
        f"{saved.every_steps}); expected one interval that is a multiple of the other"
    )


def _of_hooks(job: Job) -> Problems:
    """Hooks that are listed twice."""
    names = [table.name for table in job.hook]
    for i, name in enumerate(names):
        if name in names[:i]:
            yield PlacedProblem(("hook", i, "name"), f"[[hook]] name = {name!r} is listed twice; expected once")


def _of_guards(job: Job) -> Problems:
    """Rollbacks without checkpoints."""
    guard = job.guard
    if guard.rolls_back and not (job.checkpoint.every_steps or job.checkpoint.every_epochs):
        key: Key = ("guard", "non_finite" if guard.non_finite == "rollback" else "loss_spike")
        why = "a rollback needs checkpoints; expected [checkpoint] every_steps or every_epochs, found none"
        yield PlacedProblem.at(key, why)


def _of_model(job: Job, parts: Parts, plan: Plan) -> list[PlacedProblem]:
    """Problems that the modules show if they are known before the model is built, such as patterns without a match."""
    module = plan.outline
    if module is None:
        return []
    name: Key = ("model", "name")
    problems: list[PlacedProblem] = []
    with collecting(name, problems):
        refuse_unsaved_buffers(module, parts.model)
        refuse_embeddings(module, parts.model, plan.data_ranks or 1)
    if job.model.sync_batch_norm:
        with collecting(("model", "sync_batch_norm"), problems):
            refuse_batch_norms(module, parts.model.name)
    trained = [parameter for parameter, _ in module.named_parameters()]
    with collecting(("model", "freeze" if job.model.trainable is None else "trainable"), problems):
        trained = trained_names(module, job.model.freeze, job.model.trainable)
    with collecting(("optimizer", "groups"), problems):
        refuse_unmatched({key: module.get_parameter(key).shape for key in trained}, parts.optimizer_groups)
    with collecting(name, problems):
        refuse_untrained(parts.model, trained)
    return problems


def _of_axes(job: Job, parts: Parts) -> Problems:
    """Conflicts between the axes, the model and the strategy of sharding."""
    owners = dict.fromkeys(parts.sharding.axes(1, 1), "the data ranks")  # their names are the same for all numbers
    for name, plugin in parts.parallelism.items():
        owner = owners.setdefault(plugin.traits.axis, name)
        if owner != name:
            why = f"its mesh axis {plugin.traits.axis} is that of {owner}; expected a name of its own"
            yield PlacedProblem.at(("parallelism", name), why)
        if plugin.traits.has_own_parameters and not parts.sharding.sums_by_piece:
            why = (
                f"{name} has parameters of its own, which [sharding] {' = '.join(job.sharding.choice)} can't sum over some ranks "
                "only; use stage 0, 1 or 2 with it"
            )
            yield PlacedProblem.at(("parallelism", name), why)
    # a single axis checks the heads itself
    sizes = {name: job.parallelism[name].size for name, axis in parts.parallelism.items() if axis.traits.shares_heads}
    if len(sizes) > 1 and isinstance(parts.model, AttentionModel):
        heads, ranks = parts.model.attention_heads, prod(sizes.values())
        if heads % ranks and not any(heads % size for size in sizes.values()):
            axes = " x ".join(f"{name} {size}" for name, size in sizes.items())
            why = f"{axes} divide the model's {heads} attention heads, but {heads} is not divisible by {ranks} ranks"
            yield PlacedProblem.at(("parallelism",), f"{why}; choose smaller sizes")


def _of_layout(job: Job, parts: Parts, data_ranks: int) -> Problems:
    """Conflicts with the number of ranks."""
    replicate, axes = job.parallelism.get("replicate"), parts.sharding.axes
    is_trivial = replicate is None or replicate.size in (1, data_ranks)
    if replicate is not None and not is_trivial and axes(data_ranks, replicate.size) == axes(data_ranks, 1):
        why = (
            f"found {replicate.size}, but with [sharding] {' = '.join(job.sharding.choice)} all {data_ranks} data-parallel ranks "
            "hold the same; leave it out, or choose a strategy that shards"
        )
        yield PlacedProblem.at(("parallelism", "replicate"), why)
    size, micro_size = job.batch.global_size, job.batch.micro_size
    if size is not None and micro_size is not None and size % (data_ranks * micro_size):  # tokens always divide
        least = data_ranks * micro_size
        near = max(least, round(size / least) * least)
        why = (
            f"{size} does not divide over {data_ranks} data-parallel ranks x micro_size {micro_size}; expected a multiple of "
            f"{least}, such as {near}"
        )
        yield PlacedProblem.at(("batch", "global_size"), why)


def _of_dataset(job: Job) -> Problems:
    """Keys that go with some data only."""
    name, own = job.dataset.name, 'it goes with data of your own (name = "package.module:callable")'
    if not is_reference(name):
        for key in ("collate", "weights"):
            if getattr(job.dataset, key) is not None:
                yield PlacedProblem.at(("dataset", key), f"{own}, found name = {name!r}; leave it out")
    elif job.dataset.collate is not None and job.batch.tokens is not None:
        why = "batches by tokens are padded by hpctrain; use [batch] global_size and micro_size, or leave it out"
        yield PlacedProblem.at(("dataset", "collate"), why)


def _of_epochs(job: Job, parts: Parts) -> Problems:
    """Schedules by epoch without epochs; smaller last batches where all batches must have one shape."""
    if job.schedule.unit == "epoch" and job.job.epochs is None:
        why = '"epoch" needs [job] epochs, which say how long the schedule is; give these instead of steps, or leave it out'
        yield PlacedProblem.at(("schedule", "unit"), why)
    if job.batch.drop_last is not False:
        return
    axis = axis_of_one_shape(job, parts)
    reasons = []
    if job.model.sync_batch_norm:
        reasons.append("an epoch's last batch may leave a rank without samples, and batch norms take means over all")
    if axis is not None:
        reasons.append(f"{axis} needs micro batches of one shape, and an epoch's last batch is smaller")
    for why in reasons:
        yield PlacedProblem(("batch", "drop_last"), f"[batch] drop_last = false: {why}; use true, or leave it out")


def _of_tokens(job: Job, parts: Parts) -> Problems:
    """Token batches with a model that can't be padded, or with axes that need micro batches of one shape."""
    if job.batch.tokens is None:
        return
    instead = "use global_size and micro_size"
    if not isinstance(parts.model, PaddedModel):
        why = f"the model {parts.model.name!r} does not say how to pad samples of different lengths (PaddedModel)"
        yield PlacedProblem.at(("batch", "tokens"), f"{why}; {instead}")
    elif job.batch.packing and not isinstance(parts.model, PackedModel):
        why = f"the model {parts.model.name!r} does not keep samples in one row apart (PackedModel); leave it out"
        yield PlacedProblem.at(("batch", "packing"), why)
    for name, plugin in parts.parallelism.items():
        if job.batch.packing and plugin.traits.cuts_samples and not plugin.traits.cuts_documents:
            why = f"{name} does not say that it cuts each sample of a row (cuts_documents); leave one of the two out"
            yield PlacedProblem.at(("batch", "packing"), why)
        if plugin.traits.one_shape == "always":
            why = (
                f"{name} needs micro batches of one shape, and those of a token budget differ; {instead}, or {name} = 1"
            )
            yield PlacedProblem.at(("batch", "tokens"), why)
        elif plugin.traits.one_shape == "compiled" and job.compile.enabled:
            why = f"{name} is compiled for micro batches of one shape, and those of a token budget differ"
            yield PlacedProblem.at(("compile", "enabled"), f"{why}; {instead}, or leave it out")


def _of_compiling(job: Job, plan: Plan) -> Problems:
    """Jobs that the compiler can't take, or would compile another way at each start."""
    if job.model.sync_batch_norm and plan.compiles and plan.activation_checkpointing.is_compiled:
        why = (
            "it communicates, which is not compiled, and this activation checkpointing needs each block in one piece; use "
            '[activation_checkpointing] mode = "full", or leave one of them out'
        )
        yield PlacedProblem.at(("model", "sync_batch_norm"), why)
    if job.job.deterministic and job.compile.enabled and job.compile.mode != "default":
        why = f'mode = "{job.compile.mode}" chooses kernels by their time, and [job] deterministic wants the same ones'
        yield PlacedProblem.at(("compile", "mode"), f"{why} at each start; leave one of them out")
