"""Gives a program the module of a checkpoint: `hpctrain.load`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from hpctrain.base.errors import UsageError
from hpctrain.base.safe_files import RESOLVED
from hpctrain.base.torch_groups import HashStore
from hpctrain.checking.check import CheckedJob, check
from hpctrain.checkpoint.directory import behind_name
from hpctrain.checkpoint.finding import refuse_other_source
from hpctrain.checkpoint.weights import load_weights
from hpctrain.contracts.pieces import Piece
from hpctrain.job.raw import RawJob
from hpctrain.job.reading import read_job
from hpctrain.job.tables import Job
from hpctrain.model.build import build_whole, given_names, source_of
from hpctrain.model.parameters import named_tensors, tied_parameters
from hpctrain.ranks.json_collectives import world_group
from hpctrain.registry.user_code.python_objects import given_objects
from hpctrain.registry.user_code.reference import OBJECTS


def load(
    checkpoint: str | Path, job: Job | Mapping[str, Any] | None = None, weights_of: str | None = None
) -> nn.Module:
    """The whole module with the weights of `checkpoint`, on the CPU and in eval mode.

    checkpoint: a checkpoint's directory, `.../checkpoints/latest`, or a file of weights. job: the job of the model; by default the
    job.resolved.toml of the checkpoint's run. weights_of: a hook that keeps weights in checkpoints, such as "ema", whose values
    are taken in place of the model's. Collective if torch.distributed is set up. Raises HpctrainError.
    """
    path = behind_name(Path(checkpoint))
    with job_of(path, job) as checked:
        parts = checked.parts
        module = build_whole(parts.model, parts.precision.parameter_dtype, checked.job.job.seed)
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = world_group()
        given = given_names(parts.model, module)
        refuse_other_source(path, parts.formats, source_of(parts.model, checked.job.job.seed, given))
        pieces = [Piece.whole(name, one.detach()) for name, one in named_tensors(module) if name not in given]
        load_weights(path, parts.formats, pieces, group, tied_parameters(module), weights_of)
    finally:
        if alone:
            dist.destroy_process_group()
    return module.eval()


@contextmanager
def job_of(path: Path, job: Job | Mapping[str, Any] | None) -> Iterator[CheckedJob]:
    """The job of the model of the checkpoint at `path`; None for the one beside it."""
    tables = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, Job) else job
    beside = path.absolute().parent.parent / RESOLVED
    if tables is None and not beside.is_file():
        raise UsageError(f"load: {path} has no {beside}, which its run would have; give the job: load(checkpoint, job)")
    with given_objects(tables or {}) as plain:
        raw = _of_the_model(read_job(beside, ())) if tables is None else RawJob(plain, {}, "job").refuse_values()
        yield check(raw, None)


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
