"""The jobs of a program with its own loop, one for all ranks and one for each of its models, and the program's own module and
optimizer in the places of their plugins."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.errors import UsageError
from hpctrain.checking.check import CheckedJob, check
from hpctrain.contracts.dataset import Split
from hpctrain.contracts.model import Batch, tensors_in
from hpctrain.contracts.optimization import OptimizerOptions
from hpctrain.data.refusals import refuse_epochs
from hpctrain.job.raw import RawJob, merge
from hpctrain.job.reading import read_job
from hpctrain.job.tables import Job, ModelTable
from hpctrain.model.refusals import has_batch_norms
from hpctrain.registry.user_code.model import UserModel
from hpctrain.registry.user_code.optimization import UserOptimizer
from hpctrain.registry.user_code.python_objects import referenced

# tables in which models may differ
_OF_A_MODEL = "sharding", "precision", "schedule", "compile", "compression", "activation_checkpointing"
FIRST = "model"
"""The name of a model that the program gives none."""


def no_data(split: Split) -> list[Tensor] | None:
    """The data of a loop that takes none from the job."""
    return [torch.zeros(1)] * 2**20 if split == "train" else None  # more than a global batch has; one tensor


def has_data(job: Job) -> bool:
    """Whether the job has data of its own."""
    return not job.dataset.name.endswith(f":{no_data.__name__}")


def no_model() -> nn.Module:
    """A module in place of those that the program sets up."""
    return nn.Linear(1, 1)


def no_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """A loss in place of the program's own."""
    raise UsageError("the program's own loop computes the loss")


def no_optimizer(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
    """An optimizer in place of those that the program brings."""
    raise UsageError(
        "setup: the model has parameters to train and no optimizer; give setup one, give the job an [optimizer], or freeze the "
        "model with requires_grad_(False)"
    )


def job_tables(job: Job | Mapping[str, Any] | str | Path, tables: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """The tables of the job for `ranks` ranks, with `tables` on top, and stand-ins for what the program brings."""
    if isinstance(job, (str, Path)):
        merged = read_job(Path(job), ()).tables
    else:
        merged = job.model_dump(mode="json", exclude_unset=True) if isinstance(job, Job) else dict(job)
    merged = merge(merged, dict(tables))
    has_model = "name" in merged.get("model", {})
    if not has_model:
        merged["model"] = {**merged.get("model", {}), "name": no_model, "loss": no_loss}
    merged.setdefault("optimizer", {"name": no_optimizer, "lr": 1.0})  # its table needs a rate above 0
    if "dataset" not in merged:
        merged["dataset"] = {"name": no_data}
        merged.setdefault("batch", {"global_size": ranks, "micro_size": 1})  # a step without data is one micro batch
    return merged


def refuse_tables(tables: Collection[str], optimizer: object) -> None:
    """Raises UsageError for tables that are the loop's, not a model's, and for an object that is no optimizer."""
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
    merged = merge(dict(tables), dict(own))
    if module is not None:
        of_trainer = {key: value for key, value in merged["model"].items() if key in ModelTable.model_fields}
        merged["model"] = {**of_trainer, "name": no_model, "loss": no_loss}  # without options of the job's own model
        if not has_batch_norms(module):
            merged["model"].pop("sync_batch_norm", None)  # meant for the job's other models
    # without places: keys of the tables come from the job file and from the program
    checked = check(RawJob(referenced(merged), {}, f"the model {name!r}").refuse_values(), ranks)
    parts = checked.parts
    if not has_data(checked.job):
        refuse_epochs(checked.job, "stands for the loop's own data, whose epochs hpctrain doesn't know")
    if checked.job.batch.drop_last is False:
        raise UsageError(
            "[batch] drop_last = false: loop.backward() averages over micro batches of one size; expected true, or leave it out"
        )
    if any(axis.traits.ranks_have == "other parameters" for axis in parts.parallelism.values()):
        raise UsageError(
            "[parallelism]: an axis spreads the model's layers over ranks, which the forward of a program's own loop can't run; "
            "use hpctrain.run for it, or take the axis out"
        )
    if module is not None:
        parts = replace(parts, model=GivenModel(name, module))
    if optimizer is not None:
        if module is None:
            raise UsageError("setup: found an optimizer without a model; give both, or leave both to the job")
        groups = groups_of(optimizer, module, name)
        parts = replace(parts, optimizer=GivenOptimizer(optimizer), optimizer_groups=groups)
    return replace(checked, parts=parts)


class GivenModel(UserModel):
    """A module that the program has built. The program computes its loss."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(name, lambda: module, no_loss, {})

    def count(self, batch: Batch) -> int:
        """Samples: the rows of the batch's first tensor; 1 if there is none."""
        first = next(tensors_in(batch), None)
        return 1 if first is None or not first.dim() else len(first)


class GivenOptimizer(UserOptimizer):
    """Builds optimizers like one that the program has made over its module's parameters."""

    def __init__(self, like: torch.optim.Optimizer) -> None:
        kind: Any = type(like)
        defaults = dict(like.defaults)
        parameters = inspect.signature(kind.__init__).parameters
        # `defaults` has all options that an optimizer keeps; those that its constructor doesn't take follow from others
        takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        options = {key: value for key, value in defaults.items() if takes_all or key in parameters}
        rate = float(options.pop("lr", like.param_groups[0]["lr"]))
        lost = [key for key in parameters if key not in ("self", "params", "args", "kwargs") and key not in defaults]
        if lost and not takes_all:
            raise UsageError(
                f"setup: {kind.__name__} takes {lost[0]!r} and doesn't keep it in its defaults, so it can't be built anew; name "
                "it in the job's [optimizer] with its options"
            )

        def build(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
            optimizer: torch.optim.Optimizer = kind(groups, lr=lr, **options)
            return optimizer

        super().__init__(kind.__name__, build, OptimizerOptions(lr=rate))


def groups_of(optimizer: torch.optim.Optimizer, module: nn.Module, name: str) -> list[dict[str, Any]]:
    """The optimizer's parameter groups as [[optimizer.groups]] has them, by the names of the module's parameters.

    Raises UsageError for an optimizer that has taken steps, for parameters that the module lacks, and for trained ones that the
    optimizer lacks.
    """
    if optimizer.state:
        raise UsageError(
            f"setup: the optimizer of {name!r} has taken steps already; expected a new one: its state would be lost"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):  # schedulers of torch leave it there
        raise UsageError(
            f"setup: a scheduler has been made over the optimizer of {name!r}, which is built anew; make the scheduler over the "
            "one that setup returns"
        )
    if any(not float(group["lr"]) > 0 for group in optimizer.param_groups):
        raise UsageError(
            f"setup: the optimizer of {name!r} has the learning rate 0; expected more, and a schedule or 0 afterwards"
        )
    names = {id(parameter): key for key, parameter in module.named_parameters()}  # by id: `==` compares elements
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if any(number not in names for number in held):
        raise UsageError(
            f"setup: the optimizer of {name!r} has parameters that are not the model's; expected one over model.parameters()"
        )
    missing = [key for number, key in names.items() if number not in held and module.get_parameter(key).requires_grad]
    if missing:
        raise UsageError(
            f"setup: {missing[0]} of {name!r} is trained, but not in the optimizer; add it, or freeze it with requires_grad_(False)"
        )
    groups = []
    for group in optimizer.param_groups:
        trained = [names[id(parameter)] for parameter in group["params"] if parameter.requires_grad]
        if not trained:
            raise UsageError(
                "setup: a group of the optimizer has frozen parameters only; leave it out, or freeze them afterwards"
            )
        options = {key: value for key, value in group.items() if key != "params"}
        pattern = [glob.escape(key) for key in trained]  # a name may have [ or *
        rate = float(options["lr"])  # a capturable optimizer's is a tensor
        groups.append({"pattern": pattern, "max_dims": None, **options, "lr": rate})
    return groups
