"""A trial of the user's own loss on the first outputs: whether it is the mean that it has to be, or a sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.devices import forked_random_state
from hpctrain.contracts.model import Batch, ModelSpec, trained_loss
from hpctrain.plugins.user_code.model import UserModel

# elements of a sample's outputs up to which its loss is tried; more might not fit beside the activations
_MANY = 2**24
# relative; in 16 bits, numbers are within a hundredth
_OF_A_SUM = 0.05


def try_loss(spec: ModelSpec, outputs: Any, batch: Batch, device: torch.device) -> str:
    """A sentence on a user's loss that is a sum where a mean is due: two equal samples have four times the loss of one.

    "" where there is no telling what a sample is, or the loss fails on it. Every rank that has outputs calls the loss as often,
    since it may communicate.
    """
    rows = {len(one) if one.dim() else 0 for one in (*_tensors(outputs), *_tensors(batch))}
    if not isinstance(spec, UserModel) or len(rows) != 1 or 0 in rows:
        return ""
    if sum(one[:1].numel() for one in _tensors(outputs)) > _MANY:
        return ""
    try:
        tried = spec.apart()
        once, twice = ((_repeated(outputs, count), _repeated(batch, count)) for count in (1, 2))
        with torch.no_grad(), forked_random_state(device):
            single, double = (_by_name(trained_loss(tried.loss(*one))) for one in (once, twice))
    except Exception:  # a loss may need outputs of a kind, or all rows
        return ""
    for name, value in single.items():
        if abs(value) > 1e-6 and abs(double[name] - 4 * value) <= _OF_A_SUM * abs(value):
            told = f"{value:.4g} for a sample, {double[name] / 2:.4g} for it twice"
            return (
                f"the loss{name} of {spec.name} grows with the number of samples ({told}): gradients change with [batch] "
                "micro_size and the ranks; a mean over the micro batch, or a loss for each row, does not"
            )
    return ""


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in plain dicts, lists and tuples; one without rows stands for anything else."""
    if type(value) in (Tensor, nn.Parameter):
        return [value]
    inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else [torch.empty(())]
    return [tensor for one in inner for tensor in _tensors(one)] if type(value) in (dict, list, tuple) else list(inner)


def _repeated(value: Any, count: int) -> Any:
    """The first row of each tensor, `count` times."""
    if isinstance(value, Tensor):
        return torch.cat([value.detach()[:1]] * count)
    if isinstance(value, dict):
        return {key: _repeated(one, count) for key, one in value.items()}
    return type(value)(_repeated(one, count) for one in value)


def _by_name(loss: Tensor | Mapping[str, Tensor]) -> dict[str, float]:
    named = {f" {name!r}": one for name, one in loss.items()} if isinstance(loss, Mapping) else {"": loss}
    return {name: float(one) for name, one in named.items()}
