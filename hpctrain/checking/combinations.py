"""What parts of a job cannot do together, each of which is right by itself; found before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from hpctrain.errors import HpctrainError, UsageError
from hpctrain.job.parts import Parts
from hpctrain.job.problems import Problem
from hpctrain.job.reading import Key, dotted
from hpctrain.job.tables import Job
from hpctrain.mesh import DATA_AXES, layout_of
from hpctrain.model.build import refuse_embeddings, refuse_unsaved_buffers, trained_names
from hpctrain.model.groups import refuse_unmatched


def combination_problems(job: Job, parts: Parts, world_size: int | None) -> list[Problem]:
    """All that is known without the number of ranks; with it also the layout and the batch."""
    problems = [
        *_evaluation_problems(job),
        *_model_problems(job, parts),
        *_axis_problems(job, parts),
        *_token_problems(job, parts),
        *_compile_problems(job, parts),
        *_checkpointing_problems(parts),
    ]
    return problems if world_size is None else [*problems, *_layout_problems(job, parts, world_size)]


def _evaluation_problems(job: Job) -> list[Problem]:
    if job.checkpoint.keep_best is None or job.evaluation.every_steps:
        return []
    why = "[checkpoint] keep_best: it goes by the evaluation loss; expected [evaluation] every_steps, found none"
    return [Problem(("checkpoint", "keep_best"), why)]


def _model_problems(job: Job, parts: Parts) -> list[Problem]:
    """What the model's parameters show, where they are known before it is built: patterns that match nothing, say."""
    key: Key = ("model", "name")
    try:
        module = parts.model.outline
        if module is None:
            return []
        refuse_unsaved_buffers(module, parts.model)
        refuse_embeddings(module, parts.model, 1)
        key = ("model", "freeze")
        trained = trained_names(module, job.model.freeze)
        key = ("optimizer", "groups")
        refuse_unmatched(trained, parts.optimizer_groups)
    except UsageError as error:
        return [Problem(key, str(error))]
    if not trained:
        return [Problem(("model", "name"), f"[model] {parts.model.name}: it has no parameter to train")]
    return []


def _axis_problems(job: Job, parts: Parts) -> list[Problem]:
    """What the axes have against the model."""
    problems: list[Problem] = []
    taken = dict.fromkeys(DATA_AXES, "the data ranks")
    for name, plugin in parts.parallelism.items():
        axis: Key = ("parallelism", name)
        other = taken.setdefault(plugin.traits.axis, name)
        if other != name:
            why = f"its mesh axis {plugin.traits.axis} is that of {other}; expected a name of its own"
            problems.append(Problem(axis, f"{dotted(axis)}: {why}"))
        ask = partial(plugin.refuse, parts.model, job.parallelism[name].size)
        problems += _refusal(axis, dotted(axis), ask)
    return [*problems, *_head_problems(job, parts)]


def _layout_problems(job: Job, parts: Parts, world_size: int) -> list[Problem]:
    """The ranks must be a product, and the batch must divide over them."""
    problems: list[Problem] = []
    try:
        layout = layout_of(job, parts, world_size)
    except HpctrainError as error:
        return [Problem(("parallelism",), str(error))]
    replicate = job.parallelism.get("replicate")
    if replicate is not None and replicate.size not in (1, layout.axes["dp_replicate"]):
        problems.append(
            Problem(
                ("parallelism", "replicate"),
                f"[parallelism] replicate: found {replicate.size}, but with [sharding] {' = '.join(job.sharding.choice)} all "
                f"{layout.data_ranks} data-parallel ranks hold the same; leave it out, or take a strategy that shards",
            )
        )
    chosen_by, choice = job.sharding.choice
    sharding: Key = ("sharding", chosen_by)
    ask = partial(parts.sharding.refuse, parts.model, layout.axes)
    problems += _refusal(sharding, f"{dotted(sharding)} = {choice}", ask)
    compression: Key = ("compression", "name")
    ask = partial(parts.compression.refuse, parts.sharding, layout.model_axes)
    problems += _refusal(compression, f"{dotted(compression)} = {parts.compression.name!r}", ask)
    return [*problems, *_batch_problems(job, parts, layout.data_ranks)]


def _head_problems(job: Job, parts: Parts) -> list[Problem]:
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
    return [Problem(("parallelism",), f"[parallelism]: {why}")]


def _refusal(key: Key, what: str, ask: Callable[[], str | None]) -> list[Problem]:
    """What a plugin has against the job: the sentence that it returns, or an error that says where it is."""
    try:
        why = ask()
    except UsageError as error:
        return [Problem(key, str(error))]
    return [Problem(key, f"{what}: {why}")] if why else []


def _batch_problems(job: Job, parts: Parts, data_ranks: int) -> list[Problem]:
    """Whether a global batch of samples divides over the ranks, into micro batches that they can run.

    One of tokens divides over any, and an axis that minds the number of micro batches can't have it (`one_shape`).
    """
    size, micro_size = job.batch.global_size, job.batch.micro_size
    if size is None or micro_size is None:
        return []
    per_step = data_ranks * micro_size
    if size % per_step:
        near = max(per_step, round(size / per_step) * per_step)
        why = (
            f"[batch] global_size: {size} does not divide over {data_ranks} data-parallel ranks x micro_size {micro_size}; "
            f"expected a multiple of {per_step}, such as {near}"
        )
        return [Problem(("batch", "global_size"), why)]
    count, problems = size // per_step, []
    for name, plugin in parts.parallelism.items():
        what = f"[batch] micro_size: {micro_size} makes {count} micro batch{'es' * (count > 1)} per step; {name}"
        ask = partial(plugin.refuse_micro_batches, count, job.parallelism[name].size)
        problems += _refusal(("batch", "micro_size"), what, ask)
    return problems


def _token_problems(job: Job, parts: Parts) -> list[Problem]:
    """Batches by token budget need a model that can be padded, and axes that take micro batches of any shape."""
    if job.batch.tokens is None:
        return []
    instead = "use global_size and micro_size"
    problems = []
    if not parts.model.padding():
        why = f"the model {parts.model.name!r} does not say how to pad samples of different lengths (padding)"
        problems.append(Problem(("batch", "tokens"), f"[batch] tokens: {why}; {instead}"))
    for name, plugin in parts.parallelism.items():
        if plugin.traits.one_shape == "always":
            why = f"{name} needs micro batches of one shape, and those of a token budget differ"
            problems.append(Problem(("batch", "tokens"), f"[batch] tokens: {why}; {instead}, or {name} = 1"))
        elif plugin.traits.one_shape == "compiled" and job.compile.enabled:
            why = f"{name} is compiled for micro batches of one shape, and those of a token budget differ"
            problems.append(Problem(("compile", "enabled"), f"[compile] enabled: {why}; {instead}, or leave it out"))
    return problems


def _compile_problems(job: Job, parts: Parts) -> list[Problem]:
    problems: list[Problem] = []
    for name, plugin in parts.parallelism.items() if job.compile.enabled else ():
        ask = partial(plugin.refuse_compile, parts.activation_checkpointing.is_compiled)
        problems += _refusal(("compile", "enabled"), f"[compile] enabled: {name}", ask)
    return problems


def _checkpointing_problems(parts: Parts) -> list[Problem]:
    key: Key = ("activation_checkpointing", "mode")
    checkpointing = parts.activation_checkpointing
    splits_backward = any(plugin.traits.splits_backward for plugin in parts.parallelism.values())
    ask = partial(checkpointing.refuse, parts.model, splits_backward)
    return _refusal(key, f"{dotted(key)} = {checkpointing.name!r}", ask)
