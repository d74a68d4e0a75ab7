"""Watches the operators of a step: the memory of their results, from birth to death, and their floating-point operations.

Works on real tensors and on fake ones (torch's FakeTensor), so that a plan and a run are measured in the same way.
torch's own MemTracker was tried: it made a step eight times slower, and refuses a module that is called twice in a step.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hpctrain.base.torch_private import (
    READS_A_NUMBER,
    TorchDispatchMode,
    is_fake,
    local_tensors,
    operator_of,
    storage_number,
)
from hpctrain.contracts.model import tensors_in

_STORAGE: Any = torch.UntypedStorage
_BLOCK = 512
"""Bytes to which torch's allocators of accelerators round."""

_CPU_ATTENTION: dict[str, tuple[Callable[..., int], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}
"""torch's counter of an operator that its registry lacks, and of how many first arguments it takes the shapes."""
_MOVE_NOTHING = "empty", "new_empty", "set_", "resize_", "_unsafe_view"
"""Beginnings of the names of operators that neither read nor write."""


class Operator(NamedTuple):
    """The work of an operator: the data type of its input, its floating-point operations, the bytes that it reads and writes."""

    dtype: str
    flops: int
    nbytes: int


class _Life:
    """The memory of a storage: bytes, and between which events it lived."""

    __slots__ = ("birth", "death", "ident", "nbytes")

    def __init__(self, ident: int, birth: int, nbytes: int) -> None:
        self.ident, self.birth, self.death, self.nbytes = ident, birth, -1, nbytes


class Watch(TorchDispatchMode):
    """A mode for the steps of one rank. Values of fake tensors are read as 1.0, 0 and False.

    collective: is told of torch's functional collectives: the name, the inputs, the group. Since `begin`, guesses: how often an
    integer or a truth value was read of a fake tensor; peak: the most bytes that lived at once; operators: how often each kind has
    run.
    """

    def __init__(self, collective: Callable[[str, list[Tensor], Any], None] = lambda *_: None) -> None:
        made: Any = super()  # torch leaves the mode's methods without types
        made.__init__()
        self._collective = collective
        self._alive: dict[int, _Life] = {}
        self._ended: list[_Life] = []
        self._events = self._at_peak = self._now = self.peak = 0
        self._resize: Callable[..., Any] | None = None
        self.operators: Counter[Operator] = Counter()
        self.guesses = 0

    def __enter__(self) -> Any:
        self._resize = resize = _STORAGE.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            self._see_storage(storage)
            return done

        _STORAGE.resize_ = resized
        made: Any = super()
        return made.__enter__()

    def __exit__(self, *error: Any) -> None:
        assert self._resize is not None
        _STORAGE.resize_ = self._resize
        made: Any = super()
        made.__exit__(*error)

    def begin(self) -> None:
        """Look for a new peak from here on, and count anew."""
        self._ended.clear()
        self.peak, self._at_peak = self._now, self._events
        self.operators.clear()
        self.guesses = 0

    def at_peak(self, of: Mapping[str, Iterable[Tensor]], others: str) -> dict[str, int]:
        """The peak's bytes by what they are of; `others` names those of no tensor in `of`, kept or not."""
        names = {
            storage_number(one.untyped_storage()): name for name, tensors in of.items() for one in flat_locals(tensors)
        }
        found: Counter[str] = Counter(dict.fromkeys([*of, others], 0))
        for life in [*self._ended, *self._alive.values()]:
            if life.birth <= self._at_peak and (life.death < 0 or life.death > self._at_peak):
                found[names.get(life.ident, others) if life.death < 0 else others] += life.nbytes
        return dict(found)

    @staticmethod
    def bytes_of(tensors: Iterable[Tensor]) -> int:
        """The bytes of the tensors' storages on this rank, each once."""
        storages = {
            storage_number(one.untyped_storage()): one.untyped_storage().nbytes() for one in flat_locals(tensors)
        }
        return sum(storages.values())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # asks for a tensor's device
        if func is READS_A_NUMBER and is_fake(args[0]):
            self.guesses += not args[0].dtype.is_floating_point
            return _read(args[0].dtype)
        if func is torch.ops.aten.equal.default and is_fake(args[0]):
            return True
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # a tensor that is spread over ranks: its parts on this rank come through here
        found = func(*args, **kwargs)
        operator, name = operator_of(func)
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            self._collective(name, list(tensors_in(args[0])), args[-1])
        results = list(tensors_in(found))
        for tensor in results if not func.is_view else ():
            self._see(tensor)
        if not (func.is_view or name.startswith(_MOVE_NOTHING)):
            given = list(tensors_in((*args, *kwargs.values())))
            flops = _flops(operator, name, args, kwargs, found)
            dtype = str(given[0].dtype if given else torch.get_default_dtype()).removeprefix("torch.")
            self.operators[Operator(dtype, flops, sum(one.nbytes for one in (*given, *results)))] += 1
        return found

    def _see(self, tensor: Tensor) -> None:
        for one in local_tensors(tensor):
            if one.device.type != "meta":  # without memory
                self._see_storage(one.untyped_storage())

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        ident, nbytes = storage_number(storage), -(-storage.nbytes() // _BLOCK) * _BLOCK
        known = self._alive.get(ident)
        if known is not None and known.nbytes == nbytes:
            return
        if known is not None:
            self._end(ident)
        if not nbytes:
            return
        self._events += 1
        self._alive[ident] = _Life(ident, self._events, nbytes)
        self._now += nbytes
        if self._now > self.peak:
            self.peak, self._at_peak = self._now, self._events
        if known is None:
            weakref.finalize(storage, self._end, ident).atexit = False

    def _end(self, ident: int) -> None:
        life = self._alive.pop(ident, None)
        if life is not None:
            self._events += 1
            life.death = self._events
            self._now -= life.nbytes
            self._ended.append(life)


def _flops(operator: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Any) -> int:
    """The floating-point operations of an operator, as torch counts them; attention on the CPU like that on accelerators."""
    if name in _CPU_ATTENTION:
        count, tensors = _CPU_ATTENTION[name]
        return int(count(*(one.shape for one in args[:tensors])))
    return int(flop_registry[operator](*args, **kwargs, out_val=found)) if operator in flop_registry else 0


def flat_locals(tensors: Iterable[Tensor]) -> Iterable[Tensor]:
    """The tensors, and of those that are spread over ranks this rank's parts."""
    for tensor in tensors:
        yield from local_tensors(tensor)


def _read(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 0  # an optimizer divides by what it makes of its count of steps
