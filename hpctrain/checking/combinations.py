"""Finds parts of a job that are valid alone but not together, before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm, prod

from hpctrain.base.errors import UsageError
from hpctrain.contracts.model import AttentionModel, PackedModel, PaddedModel
from hpctrain.contracts.plan import Plan
from hpctrain.data.shapes import axis_of_one_shape
from hpctrain.job.parts import Parts
from hpctrain.job.problems import PlacedProblem
from hpctrain.job.raw import Key, dotted
from hpctrain.job.tables import Job
from hpctrain.model.batch_norm import refuse_batch_norms
from hpctrain.model.parameters import trained_names
from hpctrain.model.refusals import refuse_embeddings, refuse_unmatched, refuse_unsaved_buffers, refuse_untrained
from hpctrain.plugins.user_code import is_reference


def combination_problems(job: Job, parts: Parts, plan: Plan) -> list[PlacedProblem]:
    """The core's objections to the job. If `plan` has a layout, the layout and the batch are checked, too."""
    return [
        *_evaluation_problems(job),
        *_hook_problems(job),
        *_guard_problems(job, parts),
        *_model_problems(job, parts, plan),
        *_axis_problems(job, parts),
        *_dataset_problems(job),
        *_epoch_problems(job, parts),
        *_token_problems(job, parts),
        *_compile_problems(job),
        *comparison_problems(
            job, parts, parts.communicator.on_accelerators or job.communicator.device == "accelerator"
        ),
        *_norm_problems(job, plan),
        *_replicate_problems(job, parts, plan),
        *_batch_problems(job, plan),
        *_elastic_problems(job, plan),
    ]


def _evaluation_problems(job: Job) -> list[PlacedProblem]:
    """Keys that need evaluations, in a job that has none."""
    if job.evaluation.enabled:
        return _best_problems(job)
    expected = "expected [evaluation] every_steps or every_epochs, found none"
    problems = [
        PlacedProblem(("metric", i), f"[[metric]] name = {table.name!r}: it needs evaluations; {expected}")
        for i, table in enumerate(job.metric)
    ]
    if job.checkpoint.keep_best is not None:
        why = f"[checkpoint] keep_best: it needs evaluations; {expected}"
        problems.append(PlacedProblem(("checkpoint", "keep_best"), why))
    return problems


def _best_problems(job: Job) -> list[PlacedProblem]:
    """Best checkpoints in a job of which no step but the last, which always stays, is both evaluated and saved. A job that is too
    short for its intervals is a trial of a longer one: its last step is both."""
    table, evaluation, steps = job.checkpoint, job.evaluation, job.job.steps
    if table.keep_best is None:
        return []
    key: Key = ("checkpoint", "keep_best")
    if not (table.every_steps or table.every_epochs):
        why = "only the last step is saved; expected [checkpoint] every_steps or every_epochs, found none"
        return [PlacedProblem(key, f"[checkpoint] keep_best: {why}")]
    apart = [table.every_epochs, evaluation.every_epochs]
    both = lcm(table.every_steps, evaluation.every_steps)
    is_short = steps is not None and steps <= max(table.every_steps, evaluation.every_steps)
    if any(apart) or steps is None or is_short or both < steps:
        return []
    why = (
        f"no step of {steps} but the last is both evaluated (every {evaluation.every_steps} steps) and saved (every "
        f"{table.every_steps}); expected one interval that is a multiple of the other"
    )
    return [PlacedProblem(key, f"[checkpoint] keep_best: {why}")]


def _hook_problems(job: Job) -> list[PlacedProblem]:
    names = [table.name for table in job.hook]
    twice = [i for i, name in enumerate(names) if name in names[:i]]
    return [
        PlacedProblem(("hook", i, "name"), f"[[hook]] name = {names[i]!r} is listed twice; expected once")
        for i in twice
    ]


def _guard_problems(job: Job, parts: Parts) -> list[PlacedProblem]:
    """Guards that the job's layout or its checkpoints don't allow."""
    table, problems = job.guard, []
    if table.rolls_back and not (job.checkpoint.every_steps or job.checkpoint.every_epochs):
        key: Key = ("guard", "non_finite" if table.non_finite == "rollback" else "loss_spike")
        why = "a rollback needs checkpoints; expected [checkpoint] every_steps or every_epochs, found none"
        problems.append(PlacedProblem(key, f"{dotted(key)}: {why}"))
    if table.oom == "skip":
        found = [f"[parallelism] {name} = {job.parallelism[name].size}" for name in parts.parallelism]
        if job.model.sync_batch_norm:
            found.append("[model] sync_batch_norm")
        if not parts.sharding.may_sit_out:
            found.append(f"[sharding] {' = '.join(job.sharding.choice)}")
        if found:
            why = (
                f"{found[0]} communicates in forward and backward, where the other ranks would wait for the one without memory; "
                'expected [sharding] stage 0, 1 or 2 without other axes; use oom = "stop"'
            )
            problems.append(PlacedProblem(("guard", "oom"), f"[guard] oom: {why}"))
    if table.replica_check_every and parts.sharding.ranks_diverge:
        why = f"with [sharding] {' = '.join(job.sharding.choice)} ranks train weights of their own between sums; leave it out"
        problems.append(PlacedProblem(("guard", "replica_check_every"), f"[guard] replica_check_every: {why}"))
    return problems


def comparison_problems(job: Job, parts: Parts, on_accelerators: bool) -> list[PlacedProblem]:
    """An axis whose ranks send each other tensors, on accelerators whose collectives are compared."""
    traits = {name: plugin.traits for name, plugin in parts.parallelism.items()}
    sending = [name for name, one in traits.items() if one.interleaves or (one.cuts_samples and not one.shares_heads)]
    if not (job.communicator.check and on_accelerators and sending):
        return []
    why = (
        f"[parallelism] {sending[0]} sends and receives at once, which blocks on accelerators where collectives are compared: "
        "torch then takes one after the other; leave check out, or try it on CPUs"
    )
    return [PlacedProblem(("communicator", "check"), f"[communicator] check: {why}")]


def _model_problems(job: Job, parts: Parts, plan: Plan) -> list[PlacedProblem]:
    """Problems visible in the model's modules, if known before the model is built: patterns without a match, say."""
    module = plan.outline
    if module is None:
        return []
    name: Key = ("model", "name")
    problems: list[PlacedProblem] = []
    with _problem_at(name, problems):
        refuse_unsaved_buffers(module, parts.model)
        refuse_embeddings(module, parts.model, plan.data_ranks or 1)
    if job.model.sync_batch_norm:
        with _problem_at(("model", "sync_batch_norm"), problems):
            refuse_batch_norms(module, parts.model.name)
    trained = [parameter for parameter, _ in module.named_parameters()]
    with _problem_at(("model", "freeze" if job.model.trainable is None else "trainable"), problems):
        trained = trained_names(module, job.model.freeze, job.model.trainable)
    with _problem_at(("optimizer", "groups"), problems):
        refuse_unmatched({key: module.get_parameter(key).shape for key in trained}, parts.optimizer_groups)
    with _problem_at(name, problems):
        refuse_untrained(parts.model, trained)
    return problems


@contextmanager
def _problem_at(key: Key, problems: list[PlacedProblem]) -> Iterator[None]:
    """A UsageError in the block becomes a problem."""
    try:
        yield
    except UsageError as error:
        problems.append(PlacedProblem(key, str(error)))


def _axis_problems(job: Job, parts: Parts) -> list[PlacedProblem]:
    """Conflicts between the axes and the model."""
    problems: list[PlacedProblem] = []
    taken = dict.fromkeys(parts.sharding.axes(1, 1), "the data ranks")
    for name, plugin in parts.parallelism.items():
        axis: Key = ("parallelism", name)
        other = taken.setdefault(plugin.traits.axis, name)
        if other != name:
            why = f"its mesh axis {plugin.traits.axis} is that of {other}; expected a name of its own"
            problems.append(PlacedProblem(axis, f"{dotted(axis)}: {why}"))
    return [*problems, *_head_problems(job, parts), *_own_parameter_problems(job, parts)]


def _replicate_problems(job: Job, parts: Parts, plan: Plan) -> list[PlacedProblem]:
    replicate = job.parallelism.get("replicate")
    ranks = plan.data_ranks
    if replicate is None or ranks is None or replicate.size in (1, ranks):
        return []
    if parts.sharding.axes(ranks, replicate.size) != parts.sharding.axes(ranks, 1):
        return []
    why = (
        f"[parallelism] replicate: found {replicate.size}, but with [sharding] {' = '.join(job.sharding.choice)} all "
        f"{ranks} data-parallel ranks hold the same; leave it out, or choose a strategy that shards"
    )
    return [PlacedProblem(("parallelism", "replicate"), why)]


def _own_parameter_problems(job: Job, parts: Parts) -> list[PlacedProblem]:
    """An axis whose parameters are not summed over all data-parallel ranks, and a strategy that can't do that."""
    if parts.sharding.sums_by_piece:
        return []
    named = " = ".join(map(str, job.sharding.choice))
    return [
        PlacedProblem(
            ("parallelism", name),
            f"[parallelism] {name}: {name} has parameters of its own, which [sharding] {named} can't sum over some ranks only; "
            "use stage 0, 1 or 2 with it",
        )
        for name, plugin in parts.parallelism.items()
        if plugin.traits.has_own_parameters
    ]


def _head_problems(job: Job, parts: Parts) -> list[PlacedProblem]:
    """Problems of several axes that divide the attention heads. A single axis checks this itself."""
    sharing = {
        name: job.parallelism[name].size for name, plugin in parts.parallelism.items() if plugin.traits.shares_heads
    }
    if not isinstance(parts.model, AttentionModel):
        return []
    heads, ranks = parts.model.attention_heads, prod(sharing.values())
    if len(sharing) < 2 or heads % ranks == 0 or any(heads % size for size in sharing.values()):
        return []
    axes = " x ".join(f"{name} {size}" for name, size in sharing.items())
    why = f"{axes} divide the model's {heads} attention heads, but {heads} is not divisible by {ranks} ranks; choose smaller sizes"
    return [PlacedProblem(("parallelism",), f"[parallelism]: {why}")]


def _batch_problems(job: Job, plan: Plan) -> list[PlacedProblem]:
    """Whether a global batch of samples divides over the ranks. A global batch of tokens always does."""
    size, micro_size = job.batch.global_size, job.batch.micro_size
    data_ranks = plan.data_ranks
    if size is None or micro_size is None or data_ranks is None:
        return []
    per_step = data_ranks * micro_size
    if size % per_step == 0:
        return []
    near = max(per_step, round(size / per_step) * per_step)
    why = (
        f"[batch] global_size: {size} does not divide over {data_ranks} data-parallel ranks x micro_size {micro_size}; "
        f"expected a multiple of {per_step}, such as {near}"
    )
    return [PlacedProblem(("batch", "global_size"), why)]


def _dataset_problems(job: Job) -> list[PlacedProblem]:
    """Keys that go with some data only."""
    table, problems = job.dataset, []
    for key in ("collate", "weights"):
        if getattr(table, key) is not None and not is_reference(table.name):
            why = f'it goes with data of your own (name = "package.module:callable"), found name = {table.name!r}; leave it out'
            problems.append(PlacedProblem(("dataset", key), f"[dataset] {key}: {why}"))
    if not problems and table.collate is not None and job.batch.tokens is not None:
        why = "batches by tokens are padded by hpctrain; use [batch] global_size and micro_size, or leave it out"
        problems.append(PlacedProblem(("dataset", "collate"), f"[dataset] collate: {why}"))
    return problems


def _epoch_problems(job: Job, parts: Parts) -> list[PlacedProblem]:
    """Schedules by epoch without epochs, and smaller last batches where all must be of one shape."""
    problems: list[PlacedProblem] = []
    if job.schedule.unit == "epoch" and job.job.epochs is None:
        why = '"epoch" needs [job] epochs, which say how long the schedule is; give these instead of steps, or leave it out'
        problems.append(PlacedProblem(("schedule", "unit"), f"[schedule] unit: {why}"))
    if job.batch.drop_last is False and job.model.sync_batch_norm:
        why = "an epoch's last batch may leave a rank without samples, and batch norms take means over all; use true"
        problems.append(PlacedProblem(("batch", "drop_last"), f"[batch] drop_last = false: {why}, or leave it out"))
    one_shape = axis_of_one_shape(job, parts)
    if job.batch.drop_last is False and one_shape is not None:
        why = f"{one_shape} needs micro batches of one shape, and an epoch's last batch is smaller; use true, or leave it out"
        problems.append(PlacedProblem(("batch", "drop_last"), f"[batch] drop_last = false: {why}"))
    return problems


def _token_problems(job: Job, parts: Parts) -> list[PlacedProblem]:
    """Token batches need a model that can be padded, and axes that take micro batches of any shape."""
    if job.batch.tokens is None:
        return []
    instead = "use global_size and micro_size"
    problems = []
    if not isinstance(parts.model, PaddedModel):
        why = f"the model {parts.model.name!r} does not say how to pad samples of different lengths (PaddedModel)"
        problems.append(PlacedProblem(("batch", "tokens"), f"[batch] tokens: {why}; {instead}"))
    elif job.batch.packing and not isinstance(parts.model, PackedModel):
        why = f"the model {parts.model.name!r} does not keep samples in one row apart (PackedModel)"
        problems.append(PlacedProblem(("batch", "packing"), f"[batch] packing: {why}; leave it out"))
    for name, plugin in parts.parallelism.items():
        if job.batch.packing and plugin.traits.cuts_samples and not plugin.traits.cuts_documents:
            why = f"{name} does not say that it cuts each sample of a row (cuts_documents)"
            problems.append(PlacedProblem(("batch", "packing"), f"[batch] packing: {why}; leave one of the two out"))
        if plugin.traits.one_shape == "always":
            why = f"{name} needs micro batches of one shape, and those of a token budget differ"
            problems.append(PlacedProblem(("batch", "tokens"), f"[batch] tokens: {why}; {instead}, or {name} = 1"))
        elif plugin.traits.one_shape == "compiled" and job.compile.enabled:
            why = f"{name} is compiled for micro batches of one shape, and those of a token budget differ"
            problems.append(
                PlacedProblem(("compile", "enabled"), f"[compile] enabled: {why}; {instead}, or leave it out")
            )
    return problems


def _norm_problems(job: Job, plan: Plan) -> list[PlacedProblem]:
    """Batch norms that communicate, in blocks that have to be compiled in one piece."""
    if not (job.model.sync_batch_norm and plan.compiles and plan.activation_checkpointing.is_compiled):
        return []
    why = (
        "it communicates, which is not compiled, and this activation checkpointing needs each block in one piece; use "
        '[activation_checkpointing] mode = "full", or leave one of them out'
    )
    return [PlacedProblem(("model", "sync_batch_norm"), f"[model] sync_batch_norm: {why}")]


def _compile_problems(job: Job) -> list[PlacedProblem]:
    """A kernel that is chosen by measuring may be another one at the next start."""
    if not (job.job.deterministic and job.compile.enabled and job.compile.mode != "default"):
        return []
    why = f'mode = "{job.compile.mode}" chooses kernels by their time, and [job] deterministic wants the same ones at each start'
    return [PlacedProblem(("compile", "mode"), f"[compile] mode: {why}; leave one of them out")]


def _elastic_problems(job: Job, plan: Plan) -> list[PlacedProblem]:
    """Fewest ranks that are more than there are."""
    if job.elastic is None or plan.axes is None:
        return []
    ranks, least = prod(plan.axes.values()), job.elastic.min_ranks
    if least <= ranks:
        return []
    why = f"[elastic] min_ranks: found {least}, but the job starts on {ranks}; expected at most as many, or more ranks"
    return [PlacedProblem(("elastic", "min_ranks"), why)]
