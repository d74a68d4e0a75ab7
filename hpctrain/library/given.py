"""A program's own module and optimizer in the places of a job's plugins."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.errors import UsageError
from hpctrain.contracts.model import Batch, tensors_in
from hpctrain.contracts.optimization import OptimizerOptions
from hpctrain.plugins.user_code.model import UserModel
from hpctrain.plugins.user_code.optimization import UserOptimizer


class GivenModel(UserModel):
    """A module that the program has built. The program computes its loss."""

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__(
            name, lambda: module, no_loss, {}
        )  # who builds it converts its numbers, complex ones to complex ones

    def count(self, batch: Batch) -> int:
        """Samples: the rows of the batch's first tensor; 1 if there is none."""
        first = next(tensors_in(batch), None)
        return 1 if first is None or not first.dim() else len(first)


def no_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """A loss in the place of the program's own."""
    raise UsageError("the program's own loop computes the loss")


class GivenOptimizer(UserOptimizer):
    """Builds optimizers like one that the program has made over its module's parameters."""

    def __init__(self, like: torch.optim.Optimizer) -> None:
        kind: Any = type(like)
        defaults = dict(like.defaults)
        known = inspect.signature(kind.__init__).parameters
        takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
        options = {key: value for key, value in defaults.items() if takes_all or key in known}
        rate = float(options.pop("lr", like.param_groups[0]["lr"]))
        lost = [key for key in known if key not in ("self", "params", "args", "kwargs") and key not in defaults]
        if lost and not takes_all:
            raise UsageError(
                f"setup: {kind.__name__} takes {lost[0]!r} and doesn't keep it in its defaults, so it can't be built anew; name "
                "it in the job's [optimizer] with its options"
            )

        def build(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
            made: torch.optim.Optimizer = kind(groups, lr=lr, **options)
            return made

        super().__init__(kind.__name__, build, _Rate(lr=rate))


class _Rate(OptimizerOptions):
    """The learning rate alone: the factory knows the rest."""


def groups_of(optimizer: torch.optim.Optimizer, module: nn.Module, name: str) -> list[dict[str, Any]]:
    """The optimizer's parameter groups as [[optimizer.groups]] has them, by the names of the module's parameters.

    Raises UsageError for an optimizer that has taken steps, for parameters that the module lacks, and for trained ones that the
    optimizer lacks.
    """
    if optimizer.state:
        raise UsageError(
            f"setup: the optimizer of {name!r} has taken steps already; expected a new one: its state would be lost"
        )
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise UsageError(
            f"setup: a scheduler has been made over the optimizer of {name!r}, which is built anew; make the scheduler over the "
            "one that setup returns"
        )
    if any(not float(group["lr"]) > 0 for group in optimizer.param_groups):
        raise UsageError(
            f"setup: the optimizer of {name!r} has the learning rate 0; expected more, and a schedule or 0 afterwards"
        )
    names = {id(parameter): key for key, parameter in module.named_parameters()}
    held = [id(one) for group in optimizer.param_groups for one in group["params"]]
    if any(one not in names for one in held):
        raise UsageError(
            f"setup: the optimizer of {name!r} has parameters that are not the model's; expected one over model.parameters()"
        )
    missing = [key for number, key in names.items() if number not in held and module.get_parameter(key).requires_grad]
    if missing:
        raise UsageError(
            f"setup: {missing[0]} of {name!r} is trained, but not in the optimizer; add it, or freeze it with requires_grad_(False)"
        )
    return list(_groups(optimizer, names))


def _groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    for group in optimizer.param_groups:
        trained = [names[id(one)] for one in group["params"] if one.requires_grad]
        if not trained:
            raise UsageError(
                "setup: a group of the optimizer has frozen parameters only; leave it out, or freeze them afterwards"
            )
        options = {key: value for key, value in group.items() if key != "params"}
        yield {
            "pattern": [glob.escape(one) for one in trained],
            "max_dims": None,
            **options,
            "lr": float(options["lr"]),
        }
