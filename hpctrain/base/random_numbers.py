"""Random numbers that depend on seeds and names alone, so that every layout of ranks has the same: initial values, which depend on
(seed, name, row), and the draws of data sets.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hpctrain.base.torch_private import sample_dirichlet, standard_gamma

ROWS_PER_DRAW = 64
"""Rows drawn from one generator. A rank that holds some rows draws fewer than this many in excess at each end."""

_LARGE = 2**20
"""Elements for which threads are worth their start."""


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any parts; different parts give unrelated seeds."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def fill_normal(tensor: Tensor, std: float, seed: int, name: str, rows: tuple[int, int]) -> None:
    """Fill `tensor`, the rows `rows` of the parameter `name`, with normal numbers of standard deviation `std`.

    Draws in float32 on the CPU, so that device and dtype affect only the rounding; a large tensor on all of torch's threads.
    """
    first, end = rows
    values = tensor.detach() if tensor.dim() else tensor.detach().view(1)
    is_drawn_in_place = values.device.type == "cpu" and values.dtype == torch.float32 and values.is_contiguous()

    def fill(draw: int) -> None:
        generator = torch.Generator().manual_seed(derive_seed(seed, name, draw))
        begin = draw * ROWS_PER_DRAW
        low, high = max(first, begin), min(end, begin + ROWS_PER_DRAW)
        part, shape = values[low - first : high - first], (ROWS_PER_DRAW, *values.shape[1:])
        block = part if is_drawn_in_place and part.shape == shape else torch.empty(shape, dtype=torch.float32)
        torch.randn(shape, generator=generator, out=block)
        numbers = block.numpy()
        np.multiply(numbers, np.float32(std), out=numbers)  # torch would start threads for it in each of these threads
        if block is not part:
            part.copy_(block[low - begin : high - begin])

    draws = range(first // ROWS_PER_DRAW, -(-end // ROWS_PER_DRAW))
    if values.numel() < _LARGE or torch.get_num_threads() == 1:
        for draw in draws:
            fill(draw)
    else:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(fill, draws))


_WITH_GENERATOR: tuple[Callable[..., Any], ...] = (
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial, torch.poisson,
    Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.bernoulli_, Tensor.bernoulli, Tensor.multinomial,
    Tensor.exponential_, Tensor.geometric_, Tensor.log_normal_, Tensor.cauchy_, torch.binomial, standard_gamma,
    sample_dirichlet,
)  # fmt: skip
"""The draws of torch that take a generator."""
_ALIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}
"""Functions that take no generator, and those that draw the same with one."""


class _Private(TorchFunctionMode):
    """Draws from a generator of its own. A mode is in force on one thread: torch's default generator belongs to the model, which
    may draw on another thread at the same time."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _ALIKE and len(args) == 1:
            like = args[0]
            given = {"dtype": like.dtype, "device": like.device, **given}
            given.pop("memory_format", None)
            func, args = _ALIKE[func], (like.shape,)
        elif func is torch.randint_like:
            like, *bounds = args
            given = {"dtype": like.dtype, "device": like.device, **given}
            given.pop("memory_format", None)
            func, args = torch.randint, (*bounds, like.shape)
        if func in _WITH_GENERATOR and given.get("generator") is None and _is_on_cpu(args, given):
            given["generator"] = self._generator
        return func(*args, **given)


def _is_on_cpu(args: tuple[Any, ...], given: Mapping[str, Any]) -> bool:
    first = args[0] if args and isinstance(args[0], Tensor) else None
    device = first.device if first is not None else torch.device(given.get("device") or "cpu")
    return device.type == "cpu"


_LOCK = threading.Lock()
"""Python and NumPy have one generator for all threads."""


def _unlock() -> None:
    """Unlock in a forked process: the thread that may have held the lock is not there."""
    global _LOCK
    _LOCK = threading.Lock()


os.register_at_fork(after_in_child=_unlock)


@contextmanager
def drawing(*parts: object) -> Iterator[None]:
    """Draws of Python, NumPy and torch (on the CPU, without dropout) in the block depend on `parts` alone. Afterwards the
    generators of Python and NumPy are as they were. One thread at a time enters such a block."""
    number = derive_seed("draws", *parts)
    with _LOCK:
        of_python, of_numpy = random.getstate(), np.random.get_state()
        random.seed(number)
        np.random.seed(number % 2**32)
        try:
            with _Private(torch.Generator().manual_seed(number)):
                yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
