"""Draws of the data: what a sample, an item of a stream or a batch draws follows from a seed and its name, whatever the ranks,
workers and resumes, and the model's draws go on as if there had been none.

Generators belong to the process, so code of the data runs where nothing else draws meanwhile: in a worker, or between two steps.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

T = TypeVar("T")
Name = tuple[object, ...]

_MT19937 = 624 * 4 + 4  # bytes of its state: words, and the place among them
_GLOBAL = 3  # Python's, NumPy's and torch's
_LEAVES = (int, float, complex, str, bytes, type(None), np.ndarray, torch.Tensor, type, ModuleType, FunctionType)
# how deep a data set is searched for generators of its own, in how many objects, and in how long lists
_DEPTH, _OBJECTS, _ENTRIES = 6, 1000, 64


class Generator(NamedTuple):
    """A random generator."""

    state: Callable[[], Any]
    restore: Callable[[Any], object]
    seed: Callable[[int], object]


def _python(of: Any) -> Generator:
    return Generator(of.getstate, of.setstate, of.seed)


def _torch(of: torch.Generator) -> Generator:
    def restore(state: bytes) -> None:
        of.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Generator(lambda: of.get_state().numpy().tobytes(), restore, of.manual_seed)


def _global_of_numpy() -> Generator:
    """NumPy's global generator. Its state takes 30 us to copy; its memory tells within one whether it has drawn since."""
    module: Any = np.random  # whose stubs lack some of it
    of, bits = module.get_state.__self__, module.get_bit_generator()
    memory, kept = b"", dict[str, Any]()

    def state() -> dict[str, Any]:
        """The same object as before unless the state has changed."""
        nonlocal memory, kept
        is_known = isinstance(bits, np.random.MT19937) and module.get_bit_generator() is bits
        now = ctypes.string_at(bits.ctypes.state_address, _MT19937) if is_known else b""
        if not now or now != memory:
            kept = of.get_state(legacy=False)
            words = kept["state"] if now else {}  # another build of NumPy's may lay its memory out in another way
            is_all = bool(words) and now == words["key"].tobytes() + words["pos"].to_bytes(4, sys.byteorder)
            # a normal number that is kept for the next call goes without a trace in memory
            memory = now if is_all and not kept["has_gauss"] else b""
        return kept

    def restore(state: dict[str, Any]) -> None:
        nonlocal memory
        of.set_state(state)
        memory = b""  # the number that was kept may have come back

    return Generator(state, restore, lambda number: of.seed(number % 2**32))


def _numpy(of: np.random.Generator | np.random.RandomState) -> Generator:
    if isinstance(of, np.random.RandomState):
        old = of
        return Generator(lambda: old.get_state(legacy=False), old.set_state, lambda number: old.seed(number % 2**32))
    bits: Any = of.bit_generator

    def restore(state: Any) -> None:
        bits.state = state

    return Generator(lambda: bits.state, restore, lambda number: restore(type(bits)(number).state))


def _comparable(state: Any) -> Any:
    """A state whose parts have an == for the whole, which NumPy's arrays lack."""
    if isinstance(state, dict):
        return {key: _comparable(part) for key, part in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state


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
                yield _numpy(value)
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

    def search_again(self) -> None:
        """Look for the data's own generators anew: it may have replaced them."""
        self._found = None
        self._drawn &= set(range(_GLOBAL))

    def __reduce__(self) -> tuple[Any, ...]:
        return Draws, (self._seed, self._data)  # a worker has generators of its own

    @property
    def _generators(self) -> list[Generator]:
        if self._found is None:
            own = _own(self._data)
            self._found = [_python(random), _global_of_numpy(), _torch(torch.default_generator), *own]
        return self._found

    def of(
        self, names: Sequence[Name], call: Callable[..., T], together: Callable[[], list[T]] | None = None
    ) -> list[T]:
        """call(*name) for each name; what it draws follows from the name. together: does all of it at once, if nothing is drawn.

        Calls that draw nothing pay for one comparison. After the first draw from a generator they are repeated, and it is
        seeded for each call from then on.
        """
        generators = self._generators
        before = [one.state() for one in generators]
        while True:
            changed: Collection[int] = range(len(before))
            try:
                if together is not None and not self._drawn:
                    results = together()
                else:
                    results = [self._seeded(name, partial(call, *name), self._drawn) for name in names]
                now = {number: generators[number].state() for number in range(len(before)) if number not in self._drawn}
                changes = {number for number, state in now.items() if state is not before[number]}
                drawn = {number for number in changes if _comparable(now[number]) != _comparable(before[number])}
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
