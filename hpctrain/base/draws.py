"""Draws of the data: what a sample, an item of a stream or a batch draws follows from a seed and its name, whatever the ranks,
workers and resumes, and the model's draws go on as if there had been none.

Generators belong to the process, so code of the data runs where nothing else draws meanwhile: in a worker, or between two steps.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

T = TypeVar("T")
Name = tuple[object, ...]

_GLOBAL = 3
"""Python's, NumPy's and torch's."""
_LEAVES = (int, float, complex, str, bytes, type(None), np.ndarray, torch.Tensor, type, ModuleType, FunctionType)
_DEPTH, _OBJECTS, _ENTRIES = 6, 1000, 64
"""How deep a data set is searched for generators of its own, in how many objects, and in how long lists."""


class Generator(NamedTuple):
    """A random generator. look: something cheap that differs after a draw; `restore` takes it, too."""

    look: Callable[[], Any]
    state: Callable[[], Any]
    restore: Callable[[Any], object]
    seed: Callable[[int], object]


def _python(of: Any) -> Generator:
    return Generator(of.getstate, of.getstate, of.setstate, of.seed)


def _torch(of: torch.Generator) -> Generator:
    def state() -> bytes:
        return of.get_state().numpy().tobytes()

    def restore(state: bytes) -> None:
        of.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Generator(state, state, restore, of.manual_seed)


def _numpy() -> Generator:
    """NumPy's global generator. It takes 30 us to tell its state: 625 words in memory, and a number drawn in advance."""
    twister: Any = np.random.mtrand.get_bit_generator()
    if not isinstance(twister, np.random.MT19937):
        return _numpy_instance(np.random.get_state.__self__)  # type: ignore[attr-defined]
    memory = twister.ctypes.state_address

    def look() -> bytes:
        return ctypes.string_at(memory, 625 * 4)

    def restore(state: Any) -> None:
        if isinstance(state, bytes):
            ctypes.memmove(memory, state, len(state))
        else:
            np.random.set_state(state)

    return Generator(look, np.random.get_state, restore, lambda number: np.random.seed(number % 2**32))


class _Comparable:
    """A state of NumPy's, whose arrays have no == for the whole."""

    def __init__(self, value: Any) -> None:
        self.value, self._text = value, repr(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Comparable) and self._text == other._text


def _numpy_instance(of: np.random.Generator | np.random.RandomState) -> Generator:
    if isinstance(of, np.random.RandomState):
        old = of
        return Generator(
            state := lambda: _Comparable(old.get_state()),
            state,
            lambda kept: old.set_state(kept.value),
            lambda number: old.seed(number % 2**32),
        )
    bits: Any = of.bit_generator

    def restore(kept: _Comparable) -> None:
        bits.state = kept.value

    return Generator(
        state := lambda: _Comparable(bits.state), state, restore, lambda n: restore(_Comparable(type(bits)(n).state))
    )


def _own(data: object) -> Iterator[Generator]:
    """The generators in the attributes of a data set, and of what it holds."""
    seen, level = set[int](), [data]
    for _ in range(_DEPTH):
        inner: list[object] = []
        for value in level:
            if isinstance(value, _LEAVES) or id(value) in seen or len(seen) >= _OBJECTS:
                continue
            seen.add(id(value))
            if isinstance(value, (np.random.Generator, np.random.RandomState)):
                yield _numpy_instance(value)
            elif isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
                yield _python(value)
            elif isinstance(value, torch.Generator):
                if value.device.type == "cpu" and value is not torch.default_generator:
                    yield _torch(value)
            elif isinstance(value, (list, tuple)):
                inner += value[:_ENTRIES]
            elif isinstance(value, partial):
                inner += [value.func, value.args, value.keywords]
            elif isinstance(value, dict):
                inner += list(value.values())[:_ENTRIES]
            else:
                inner += getattr(value, "__dict__", {}).values()
        level = inner


class Draws:
    """Calls of the data's code with what they draw seeded by their names."""

    def __init__(self, seed: int, data: object) -> None:
        """data: may keep generators of its own."""
        self._seed, self._data = seed, data
        self._digest = hashlib.blake2b(f"draws {seed}".encode(), digest_size=8)
        self._found: list[Generator] | None = None
        self._drawn: set[int] = set()
        self._has_called = False

    def search_again(self) -> None:
        """Look for the data's own generators anew: it may have replaced them."""
        self._found, self._has_called = None, False
        self._drawn &= set(range(_GLOBAL))

    def __reduce__(self) -> tuple[Any, ...]:
        return Draws, (self._seed, self._data)  # a worker has generators of its own

    @property
    def _generators(self) -> list[Generator]:
        if self._found is None:
            self._found = [_python(random), _numpy(), _torch(torch.default_generator), *_own(self._data)]
        return self._found

    def of(
        self, names: Sequence[Name], call: Callable[..., T], together: Callable[[], list[T]] | None = None
    ) -> list[T]:
        """call(*name) for each name; what it draws follows from the name. together: does all of it at once, if nothing is drawn.

        Calls that draw nothing pay for one comparison. After the first draw from a generator they are repeated, and it is
        seeded for each call from then on.
        """
        generators = self._generators
        looks = {number: one.look() for number, one in enumerate(generators) if number not in self._drawn}
        known = (
            self._drawn if self._has_called else range(len(generators))
        )  # the first calls tell as a rule what is drawn
        before = {**looks, **{number: generators[number].state() for number in known}}
        self._has_called = True
        while True:
            changed: Collection[int] = before
            try:
                if together is not None and not self._drawn:
                    results = together()
                else:
                    results = [self._seeded(name, partial(call, *name), self._drawn) for name in names]
                rest = looks.keys() - self._drawn
                drawn = {number for number in rest if generators[number].look() != looks[number]}
                changed = self._drawn | drawn
            finally:
                for number in changed:
                    generators[number].restore(before[number])
            if not drawn:
                return results
            self._drawn |= drawn

    @contextmanager
    def held(self) -> Iterator[None]:
        """Leave the generators as they were before the block, for calls by `seeded`."""
        states = [(one.restore, one.state()) for one in self._generators]
        try:
            yield
        finally:
            for restore, state in states:
                restore(state)

    def seeded(self, name: Name, call: Callable[[], T]) -> T:
        """The result of one call with a name, which can't be repeated; within `held`."""
        return self._seeded(name, call, range(len(self._generators)))

    def _seeded(self, name: Name, call: Callable[[], T], numbers: Collection[int]) -> T:
        if numbers:
            digest = self._digest.copy()
            digest.update(repr(name).encode())
            seed = int.from_bytes(digest.digest(), "little") >> 1
            for number in numbers:
                self._generators[number].seed(seed)
        return call()
