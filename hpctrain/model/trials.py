"""Trials of an optimizer on a few random numbers before the first step; and a context whose forwards leave no trace."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpctrain.base.devices import forked_random_state
from hpctrain.base.torch_private import buffers_of
from hpctrain.contracts.optimization import Optimizer
from hpctrain.contracts.plugin import broken

Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

_LR = 0.01
# relative to the largest change; rounding errors are below a thousandth of it
_TOLERANCE = 1e-3
# the types of attributes that a forward may set
_PLAIN = (bool, int, float, str, type(None))


def refuse_hidden_state(plugin: Optimizer, build: Build) -> None:
    """Raises ContractError for an optimizer that keeps state where no checkpoint finds it; does nothing if the trial fails."""
    values, *gradients = _random(4)  # three steps: the first makes the state, the third tells
    try:
        with torch.random.fork_rng(devices=[]):
            same = _goes_on_alike(build, values, gradients)
    except Exception:  # a third party's optimizer may need a GPU, or other shapes
        return
    if not same:
        found = "makes another step after its state and its groups' numbers were put into a new optimizer"
        raise broken(plugin, found, "everything that lasts from step to step in `state` or in the groups")


def updates_parts_alike(build: Build) -> bool:
    """Whether an optimizer changes half of a matrix as it changes that half within the whole, in two steps on random values.

    An optimizer that reads the whole matrix (Muon, LAMB) gives another result on each layout. If the trial itself fails, or
    compares random numbers, the answer is True.
    """
    values, *gradients = _random(3)
    try:
        with torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            whole, halves = (_changes(build, values, gradients, count) for count in (1, 2))
            draws = not torch.equal(before, torch.get_rng_state())
    except Exception:  # a third party's optimizer may need a GPU, or other shapes
        return True
    return draws or bool((whole - halves).abs().max() <= _TOLERANCE * whole.abs().max())


def _random(count: int) -> Tensor:
    """(count, 8, 6)"""
    own = torch.Generator().manual_seed(0)  # the trial must not change what the job draws
    return 0.1 * torch.randn(count, 8, 6, dtype=torch.float32, generator=own)


def _changes(build: Build, values: Tensor, gradients: list[Tensor], count: int) -> Tensor:
    """The change after some steps of a matrix that is split into `count` parameters."""
    parts = [nn.Parameter(part.clone()) for part in values.chunk(count)]
    optimizer = build([{"params": parts, "lr": _LR}])
    for gradient in gradients:
        for part, share in zip(parts, gradient.chunk(count), strict=True):
            part.grad = share.clone()
        optimizer.step()
    return torch.cat([part.detach() for part in parts]) - values


def _goes_on_alike(build: Build, values: Tensor, gradients: list[Tensor]) -> bool:
    """Whether a new optimizer with the state of another one makes the same step."""
    first = nn.Parameter(values.clone())
    optimizer = build([{"params": [first], "lr": _LR}])
    for gradient in gradients[:-1]:
        first.grad = gradient.clone()
        optimizer.step()
    second = nn.Parameter(first.detach().clone())
    other = build([{"params": [second], "lr": _LR}])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # else both would share tensors
    before = first.detach().clone()
    for parameter, one in ((first, optimizer), (second, other)):
        parameter.grad = gradients[-1].clone()
        torch.default_generator.manual_seed(0)  # as a run seeds what a step draws
        one.step()
    difference, change = (first - second).abs().max(), (first - before).abs().max()
    overflows = not change.isfinite()  # with a weight decay of 1e16, say: such numbers tell nothing
    return overflows or bool(difference <= _TOLERANCE * change)


@contextmanager
def without_trace(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Undo the changes of the block's forwards to buffers, plain attributes of modules (mode, counters, flags) and random state.

    Attributes that the block adds, and changes inside of lists and other objects, stay.
    """
    inner = list(module.modules())
    kept = [(buffers, dict(buffers)) for buffers in map(buffers_of, inner) if buffers]
    plain = [(vars(one), {key: value for key, value in vars(one).items() if type(value) in _PLAIN}) for one in inner]
    for buffers, before in kept:
        buffers.update({name: None if one is None else one.clone() for name, one in before.items()})
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with forked_random_state(device):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        for buffers, before in kept:
            buffers.clear()
            buffers.update(before)
        for attributes, values in plain:
            attributes.update(values)
