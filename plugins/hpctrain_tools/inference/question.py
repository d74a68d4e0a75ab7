"""A trained model at work: its metrics over a split, or its outputs for every sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpctrain.checking.check import CheckedJob
from hpctrain.checking.choices import refuse_machine
from hpctrain.contracts.dataset import Samples, Split, Stream
from hpctrain.contracts.plugin import Machine
from hpctrain.data.opening import make_plan, open_split
from hpctrain.data.shapes import ranks_of_a_sample
from hpctrain.model.mesh import build_meshes, layout_of
from hpctrain.ranks.meeting import World
from hpctrain.registry.life_cycle import LifeCycle
from hpctrain.training.evaluation import evaluate
from hpctrain.training.feed import evaluation_plan, make_loader, make_pool
from hpctrain.training.trained_model import TrainedModel
from hpctrain_tools.inference.prediction import Outputs, predict, refuse_outputs


@dataclass(frozen=True)
class Question:
    """A question to the weights of a checkpoint. weights: whatever `[model] weights` takes. out: where the outputs for the
    samples go, "FILE.npy"; None asks for metrics. kept_by: the plugin whose weights are taken in place of the model's."""

    weights: Path
    split: Split = "validation"
    out: Path | None = None
    kept_by: str | None = None


def answer(
    question: Question, checked: CheckedJob, world: World, device: torch.device, hooks: LifeCycle
) -> dict[str, Any]:
    """The metrics by name with `samples`, or the `shape` and `dtype` of the outputs; collective, equal on all ranks."""
    job, parts, identity = checked.job, checked.parts, world.identity
    refuse_machine(job, parts, Machine(identity, device), checked.registry)
    layout = layout_of(job, parts, identity.size)
    meshes = build_meshes(layout, device)
    samples, lengths = open_split(job, parts, question.split, identity.node)
    if question.out is not None:
        refuse_outputs(parts, lengths is not None, isinstance(samples, Stream))
    model = TrainedModel(job, parts, meshes, device, hooks)
    model.load(question.weights, question.kept_by)
    plan = make_plan(job, parts, lengths, meshes.data_rank, layout.data_ranks)
    pool = make_pool(job, parts, samples)
    loader = make_loader(pool, evaluation_plan(plan, samples), model.split, job, parts, device)
    try:
        if question.out is None:
            found = evaluate(model, loader)
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
