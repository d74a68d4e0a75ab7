"""Undoes what a forward leaves behind in a module and in the generators of random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from hpctrain.base.devices import forked_random_state
from hpctrain.base.torch_private import buffers_of

_PLAIN = (bool, int, float, str, type(None))


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
