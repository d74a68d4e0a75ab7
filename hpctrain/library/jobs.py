"""The jobs of a program with its own loop: one for all ranks, and one for each of its models."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.errors import UsageError
from hpctrain.checking.check import CheckedJob, check
from hpctrain.contracts.dataset import Split
from hpctrain.data.refusals import refuse_epochs
from hpctrain.job.raw import RawJob, merge
from hpctrain.job.reading import read_job
from hpctrain.job.tables import Job, ModelTable
from hpctrain.library.given import GivenModel, GivenOptimizer, groups_of, no_loss
from hpctrain.model.refusals import has_batch_norms
from hpctrain.plugins.user_code.python_objects import referenced

# tables in which models may differ
_OF_A_MODEL = "sharding", "precision", "schedule", "compile", "compression", "activation_checkpointing"
FIRST = "model"
"""The name of a model that the program gives none."""


def no_data(split: Split) -> list[Tensor] | None:
    """The data of a loop that takes none from the job."""
    return [torch.zeros(1)] * 2**20 if split == "train" else None


def has_data(job: Job) -> bool:
    """Whether the job has data of its own."""
    return not job.dataset.name.endswith(f":{no_data.__name__}")


def no_model() -> nn.Module:
    """A module in the place of those that the program sets up."""
    return nn.Linear(1, 1)


def no_optimizer(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """An optimizer in the place of those that the program brings."""
    raise UsageError(
        "setup: the model has parameters to train and no optimizer; give setup one, give the job an [optimizer], or freeze the "
        "model with requires_grad_(False)"
    )


def job_tables(job: Job | Mapping[str, Any] | str | Path, tables: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The tables of the job for `ranks` ranks, with `tables` on top, and with something in the place of what the program brings."""
    if isinstance(job, (str, Path)):
        found = read_job(Path(job), ()).tables
    else:
        found = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, Job) else dict(job)
    found = merge(found, dict(tables))
    has_model = "name" in found.get("model", {})
    if not has_model:
        found["model"] = {**found.get("model", {}), "name": no_model, "loss": no_loss}
    found.setdefault("optimizer", {"name": no_optimizer, "lr": 1.0})
    if "dataset" not in found:
        found["dataset"] = {"name": no_data}
        found.setdefault("batch", {"global_size": ranks, "micro_size": 1})
    return found


def refuse_tables(tables: Collection[str], optimizer: object) -> None:
    """Raises UsageError for tables that are the loop's, not a model's, and for what is no optimizer."""
    for name in tables:
        if name not in _OF_A_MODEL:
            raise UsageError(
                f"setup: [{name}] is the same for all models: give it to own_loop; expected {', '.join(_OF_A_MODEL)}"
            )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"setup: found an optimizer of type {type(optimizer).__name__}, expected a torch.optim.Optimizer"
        )


def check_model(
    tables: Mapping[str, Any],
    ranks: int,
    name: str,
    module: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    own: Mapping[str, Any],
) -> CheckedJob:
    """The job of one model. own: tables in which it differs from the others. Raises JobError with every problem."""
    found = merge(dict(tables), dict(own))
    if module is not None:
        known = {key: value for key, value in found["model"].items() if key in ModelTable.model_fields}
        found["model"] = {**known, "name": no_model, "loss": no_loss}
        if not has_batch_norms(module):
            found["model"].pop("sync_batch_norm", None)  # of the job's other models
    checked = check(RawJob(referenced(found), {}, f"the model {name!r}").refuse_values(), ranks)
    parts = checked.parts
    if not has_data(checked.job):
        refuse_epochs(checked.job, "stands for the loop's own data, whose epochs hpctrain doesn't know")
    if checked.job.batch.drop_last is False:
        raise UsageError(
            "[batch] drop_last = false: loop.backward() averages over micro batches of one size; expected true, or leave it out"
        )
    if any(one.traits.ranks_have == "other parameters" for one in parts.parallelism.values()):
        raise UsageError(
            "[parallelism]: an axis spreads the model's layers over ranks, which the forward of a program's own loop can't run; "
            "use hpctrain.run for it, or take the axis out"
        )
    if module is not None:
        parts = replace(parts, model=GivenModel(name, module))
    if optimizer is not None:
        assert module is not None
        groups = groups_of(optimizer, module, name)
        parts = replace(parts, optimizer=GivenOptimizer(optimizer), optimizer_groups=groups)
    return replace(checked, parts=parts)
