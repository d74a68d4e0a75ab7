"""What parts of a job cannot do together, each of which is right by itself; found before anything is built."""

from __future__ import annotations

from math import prod

from torch import nn

from hpctrain.contracts.plan import Plan
from hpctrain.errors import UsageError
from hpctrain.job.parts import Parts
from hpctrain.job.problems import PlacedProblem
from hpctrain.job.reading import Key, dotted
from hpctrain.job.tables import Job
from hpctrain.model.build import refuse_embeddings, refuse_unsaved_buffers
from hpctrain.model.freezing import trained_names
from hpctrain.model.groups import refuse_unmatched


def combination_problems(job: Job, parts: Parts, plan: Plan) -> list[PlacedProblem]:
    """What the core has against the job. With a layout in `plan` that includes the layout and the batch."""
    return [
        *_evaluation_problems(job),
        *_hook_problems(job),
        *_model_problems(job, parts, plan.outline),
        *_axis_problems(job, parts),
        *_token_problems(job, parts),
        *_replicate_problems(job, parts, plan),
        *_batch_problems(job, plan),
    ]


def _evaluation_problems(job: Job) -> list[PlacedProblem]:
    if job.checkpoint.keep_best is None or job.evaluation.every_steps:
        return []
    why = "[checkpoint] keep_best: it goes by the evaluation loss; expected [evaluation] every_steps, found none"
    return [PlacedProblem(("checkpoint", "keep_best"), why)]


def _hook_problems(job: Job) -> list[PlacedProblem]:
    names = [table.name for table in job.hook]
    twice = [i for i, name in enumerate(names) if name in names[:i]]
    return [
        PlacedProblem(("hook", i, "name"), f"[[hook]] name = {names[i]!r} is there twice; expected once") for i in twice
    ]


def _model_problems(job: Job, parts: Parts, module: nn.Module | None) -> list[PlacedProblem]:
    """What the model's parameters show, where they are known before it is built: patterns that match nothing, say."""
    if module is None:
        return []
    key: Key = ("model", "name")
    try:
        refuse_unsaved_buffers(module, parts.model)
        refuse_embeddings(module, parts.model, 1)
        key = ("model", "freeze" if job.model.trainable is None else "trainable")
        trained = trained_names(module, job.model.freeze, job.model.trainable)
        key = ("optimizer", "groups")
        refuse_unmatched(trained, parts.optimizer_groups)
    except UsageError as error:
        return [PlacedProblem(key, str(error))]
    if not trained:
        return [PlacedProblem(("model", "name"), f"[model] {parts.model.name}: it has no parameter to train")]
    return []


def _axis_problems(job: Job, parts: Parts) -> list[PlacedProblem]:
    """What the axes have against the model."""
    problems: list[PlacedProblem] = []
    taken = dict.fromkeys(parts.sharding.axes(1, 1), "the data ranks")
    for name, plugin in parts.parallelism.items():
        axis: Key = ("parallelism", name)
        other = taken.setdefault(plugin.traits.axis, name)
        if other != name:
            why = f"its mesh axis {plugin.traits.axis} is that of {other}; expected a name of its own"
            problems.append(PlacedProblem(axis, f"{dotted(axis)}: {why}"))
    return [*problems, *_head_problems(job, parts)]


def _replicate_problems(job: Job, parts: Parts, plan: Plan) -> list[PlacedProblem]:
    replicate = job.parallelism.get("replicate")
    ranks = plan.data_ranks
    if replicate is None or ranks is None or replicate.size in (1, ranks):
        return []
    if parts.sharding.axes(ranks, replicate.size) != parts.sharding.axes(ranks, 1):
        return []
    why = (
        f"[parallelism] replicate: found {replicate.size}, but with [sharding] {' = '.join(job.sharding.choice)} all "
        f"{ranks} data-parallel ranks hold the same; leave it out, or take a strategy that shards"
    )
    return [PlacedProblem(("parallelism", "replicate"), why)]


def _head_problems(job: Job, parts: Parts) -> list[PlacedProblem]:
    """Several axes that share out the attention heads; one alone knows by itself."""
    sharing = {
        name: job.parallelism[name].size for name, plugin in parts.parallelism.items() if plugin.traits.shares_heads
    }
    heads, ranks = parts.model.attention_heads, prod(sharing.values())
    if heads is None or len(sharing) < 2 or heads % ranks == 0 or any(heads % size for size in sharing.values()):
        return []
    axes = " x ".join(f"{name} {size}" for name, size in sharing.items())
    why = (
        f"{axes} share out the model's {heads} attention heads, which {ranks} ranks do not divide; choose smaller sizes"
    )
    return [PlacedProblem(("parallelism",), f"[parallelism]: {why}")]


def _batch_problems(job: Job, plan: Plan) -> list[PlacedProblem]:
    """Whether a global batch of samples divides over the ranks; one of tokens divides over any."""
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


def _token_problems(job: Job, parts: Parts) -> list[PlacedProblem]:
    """Batches by token budget need a model that can be padded, and axes that take micro batches of any shape."""
    if job.batch.tokens is None:
        return []
    instead = "use global_size and micro_size"
    problems = []
    if not parts.model.padding():
        why = f"the model {parts.model.name!r} does not say how to pad samples of different lengths (padding)"
        problems.append(PlacedProblem(("batch", "tokens"), f"[batch] tokens: {why}; {instead}"))
    for name, plugin in parts.parallelism.items():
        if plugin.traits.one_shape == "always":
            why = f"{name} needs micro batches of one shape, and those of a token budget differ"
            problems.append(PlacedProblem(("batch", "tokens"), f"[batch] tokens: {why}; {instead}, or {name} = 1"))
        elif plugin.traits.one_shape == "compiled" and job.compile.enabled:
            why = f"{name} is compiled for micro batches of one shape, and those of a token budget differ"
            problems.append(
                PlacedProblem(("compile", "enabled"), f"[compile] enabled: {why}; {instead}, or leave it out")
            )
    return problems
