"""A trained model at work: its metrics over a split, or its outputs for every sample."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.base.errors import UsageError
from hpctrain.base.torch_private import HashStore
from hpctrain.checking.check import CheckedJob, check
from hpctrain.checking.choices import refuse_machine
from hpctrain.checking.resolved import FILE_NAME
from hpctrain.checkpoint.conversion import writing
from hpctrain.checkpoint.directory import behind_name
from hpctrain.checkpoint.weights import load_weights
from hpctrain.contracts.dataset import Samples, Split, Stream
from hpctrain.contracts.model import TokenModel
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.plugin import Machine
from hpctrain.data.loader import Loader
from hpctrain.data.opening import make_plan, open_split
from hpctrain.data.shapes import ranks_of_a_sample
from hpctrain.job.parts import Parts
from hpctrain.job.raw import RawJob
from hpctrain.job.reading import read_job
from hpctrain.job.tables import Job
from hpctrain.model.build import build_whole
from hpctrain.model.mesh import build_meshes, layout_of
from hpctrain.model.parameters import named_tensors, tied_parameters
from hpctrain.plugins.life_cycle import LifeCycle
from hpctrain.plugins.user_code.python_objects import given_objects
from hpctrain.plugins.user_code.reference import OBJECTS
from hpctrain.ranks.meeting import World
from hpctrain.training.evaluation import evaluate
from hpctrain.training.feed import evaluation_plan, make_pool
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
    loader = Loader(pool, evaluation_plan(plan, samples), model.split, device, parts.precision.parameter_dtype)
    try:
        if question.out is None:
            metrics, count = evaluate(model, parts, loader)
            return {**metrics, parts.model.counts: count}
        cut = ranks_of_a_sample(job, parts)
        assert isinstance(samples, Samples)
        outputs = Outputs(question.out, len(samples), model.loss_share == 1.0, parts, cut)
        return predict(model, loader, outputs, question.out)
    finally:
        loader.close()
        pool.close()
        model.sums.close()


def _loaded(model: TrainedModel, question: Question) -> TrainedModel:
    """`model` with the weights that the question is about. Collective."""
    model.load(question.weights, _world(), question.kept_by)
    return model


def _length(job: Job, parts: Parts) -> int:
    """Tokens of a sample in training."""
    longest = parts.model.max_seq_length if isinstance(parts.model, TokenModel) else None
    length = job.dataset.seq_length or longest
    if length is None:
        raise UsageError("sample needs the length of a sample; give [dataset] seq_length", everywhere=True)
    return length


def _world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def export_pretrained(checkpoint: Path, out: Path, weights_of: str | None = None) -> str:
    """Write the new directory `out` with save_pretrained() of the transformers model in a checkpoint; return the model's class.

    Raises UsageError if the run's model is no model of transformers.
    """
    if os.path.lexists(out):
        raise UsageError(f"{out} exists already; expected a new directory: give another name")
    module = load(checkpoint, weights_of=weights_of)
    found = [one for one in module.modules() if callable(getattr(one, "save_pretrained", None))]
    if not found:
        raise UsageError(
            f"{checkpoint}: its model, {type(module).__name__}, has no save_pretrained(); expected a model of transformers: export "
            "--to safetensors takes any"
        )
    save: Any = found[0]
    with writing(out):
        save.save_pretrained(out)
    return type(save).__name__


def load(
    checkpoint: str | Path, job: Job | Mapping[str, Any] | None = None, weights_of: str | None = None
) -> nn.Module:
    """The whole module with the weights of `checkpoint`, on the CPU and in eval mode.

    checkpoint: a checkpoint's directory, `.../checkpoints/latest`, or a file of weights. job: the job of the model; by default the
    job.resolved.toml of the checkpoint's run. weights_of: a hook that keeps weights in checkpoints, such as "ema", whose values
    are taken in place of the model's. Collective if torch.distributed is set up. Raises HpctrainError.
    """
    path = behind_name(Path(checkpoint))
    tables = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, Job) else job
    beside = path.absolute().parent.parent / FILE_NAME
    if tables is None and not beside.is_file():
        raise UsageError(f"load: {path} has no {beside}, which its run would have; give the job: load(checkpoint, job)")
    with given_objects(tables or {}) as plain:
        raw = _of_the_model(read_job(beside, ())) if tables is None else RawJob(plain, {}, "job").refuse_values()
        checked = check(raw, None)
        parts = checked.parts
        module = build_whole(parts.model, parts.precision.parameter_dtype, checked.job.job.seed)
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        pieces = [Piece.whole(name, tensor.detach()) for name, tensor in named_tensors(module)]
        load_weights(path, parts.formats, pieces, group, tied_parameters(module), weights_of)
    finally:
        if alone:
            dist.destroy_process_group()
    return module.eval()


def _of_the_model(raw: RawJob) -> RawJob:
    """A resolved job with stand-ins for what its module does not depend on, such as data that only the training program had."""
    tables: dict[str, Any] = {
        "dataset": {"name": "builtins:dict"},
        "optimizer": {"name": "torch.optim:SGD", "lr": 1.0},
        "batch": {"global_size": 1, "micro_size": 1},
    }
    tables |= {name: raw.tables[name] for name in ("job", "model", "precision", "plugins") if name in raw.tables}
    if str(tables["model"].get("loss")).startswith(f"{OBJECTS}:"):
        tables["model"] = {**tables["model"], "loss": "torch.nn.functional:mse_loss"}
    return replace(raw, tables=tables)
