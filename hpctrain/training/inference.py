"""A trained model at work: its metrics over a split, its outputs for every sample, or its text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hpctrain.base.errors import UsageError
from hpctrain.checking.check import CheckedJob
from hpctrain.checking.choices import refuse_machine
from hpctrain.contracts.dataset import Samples, Split, Stream
from hpctrain.contracts.model import TokenModel
from hpctrain.contracts.plugin import Machine
from hpctrain.data.opening import make_plan, open_split
from hpctrain.data.shapes import ranks_of_a_sample
from hpctrain.job.parts import Parts
from hpctrain.job.tables import Job
from hpctrain.model.mesh import build_meshes, layout_of
from hpctrain.plugins.life_cycle import LifeCycle
from hpctrain.ranks.json_collectives import world_group
from hpctrain.ranks.meeting import World
from hpctrain.training.evaluation import evaluate
from hpctrain.training.feed import evaluation_plan, make_loader, make_pool
from hpctrain.training.prediction import Outputs, predict, refuse_outputs
from hpctrain.training.sampling import Prompt, continue_text, text_dataset
from hpctrain.training.trained_model import TrainedModel


@dataclass(frozen=True)
class Question:
    """A question to the weights of a checkpoint. weights: whatever `[model] weights` takes. out: where the outputs for the
    samples go, "FILE.npy"; None asks for metrics. kept_by: the plugin whose weights are taken in place of the model's. prompt:
    a text to continue, instead of a split; `say` is told what is added.
    """

    weights: Path
    split: Split = "validation"
    out: Path | None = None
    kept_by: str | None = None
    prompt: Prompt | None = None
    say: Callable[[str], None] = lambda _: None


def answer(
    checked: CheckedJob, world: World, device: torch.device, hooks: LifeCycle, question: Question
) -> dict[str, Any]:
    """The metrics by name with `samples`, or the `shape` and `dtype` of the outputs; collective, equal on all ranks."""
    job, parts, identity = checked.job, checked.parts, world.identity
    if question.prompt is not None:
        job, parts = _with_whole_samples(job, parts)
    refuse_machine(job, parts, Machine(identity, device), checked.registry)
    layout = layout_of(job, parts, identity.size)
    meshes = build_meshes(layout, device)
    if question.prompt is not None:
        dataset = text_dataset(parts)
        model = _loaded(TrainedModel(job, parts, meshes, identity.node, device, hooks), question)
        return {"text": continue_text(model, dataset, _length(job, parts), question.prompt, device, question.say)}
    samples, lengths = open_split(job, parts, question.split, identity.node)
    if question.out is not None:
        refuse_outputs(parts, lengths is not None, isinstance(samples, Stream))
    model = _loaded(TrainedModel(job, parts, meshes, identity.node, device, hooks), question)
    plan = make_plan(job, parts, lengths, meshes.data_rank, layout.data_ranks)
    pool = make_pool(job, parts, samples)
    loader = make_loader(pool, evaluation_plan(plan, samples), model.split, job, parts, device)
    try:
        if question.out is None:
            found = evaluate(model, parts, loader)
            assert found is not None  # nobody asks it to stop
            metrics, count = found
            return {**metrics, parts.model.counts: count}
        cut = ranks_of_a_sample(job, parts)
        assert isinstance(samples, Samples)
        outputs = Outputs(question.out, len(samples), model.loss_share == 1.0, parts, cut)
        return predict(model, loader, outputs, question.out)
    finally:
        loader.close()
        pool.close()
        model.sums.close()


def _with_whole_samples(job: Job, parts: Parts) -> tuple[Job, Parts]:
    """The job without axes that cut samples: one text that grows has no parts."""
    kept = {name: axis for name, axis in parts.parallelism.items() if not axis.traits.cuts_samples}
    tables = {name: table for name, table in job.parallelism.items() if name in kept or name not in parts.parallelism}
    return job.model_copy(update={"parallelism": tables}), replace(parts, parallelism=kept)


def _loaded(model: TrainedModel, question: Question) -> TrainedModel:
    """`model` with the weights that the question is about. Collective."""
    model.load(question.weights, world_group(), question.kept_by)
    return model


def _length(job: Job, parts: Parts) -> int:
    """Tokens of a sample in training."""
    longest = parts.model.max_seq_length if isinstance(parts.model, TokenModel) else None
    length = job.dataset.seq_length or longest
    if length is None:
        raise UsageError("sample needs the length of a sample; give [dataset] seq_length", everywhere=True)
    return length
