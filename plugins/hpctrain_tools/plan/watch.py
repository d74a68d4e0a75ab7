"""Watches the operators of a step: the memory of their results, and their floating-point operations.

Works on real tensors and on fake ones (torch's FakeTensor), so that a plan and a run are measured in the same way.
torch's own MemTracker was tried: it made a step eight times slower, and refuses a module that is called twice in a step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from hpctrain.base.flops import operator_flops
from hpctrain.base.torch_private import TorchDispatchMode, is_fake, operator_of
from hpctrain.contracts.model import tensors_in
from hpctrain_tools.plan.ledger import Ledger, Origin
from hpctrain_tools.plan.torch_fake import ASKS_DEVICE, PINS, READS_A_NUMBER, WAITS, kind_of, local_tensors

_STORAGE: Any = torch.UntypedStorage

# beginnings of the names of operators that neither read nor write
_MOVE_NOTHING = "empty", "new_empty", "set_", "resize_", "_unsafe_view"


class Operator(NamedTuple):
    """The work of an operator: the data type of its input, its floating-point operations, the bytes that it reads and writes."""

    dtype: str
    flops: int
    nbytes: int


class Watch(TorchDispatchMode):
    """A mode for the steps of one rank. Values of fake tensors are read as 1.0, 0 and False.

    device: the memory of the device that computes. host: that of the CPU beside an accelerator. collective: is told of torch's
    functional collectives: the name, the inputs, the group. Since `begin`, guesses: how often an integer or a truth value was read
    of a fake tensor; operators: how often each kind has run.
    """

    def __init__(
        self, kind: str = "cpu", collective: Callable[[str, list[Tensor], Any], None] = lambda *_: None
    ) -> None:
        """kind: of the device that computes."""
        made: Any = super()  # torch leaves the mode's methods without types
        made.__init__()
        self._kind, self._collective = kind, collective
        self.device, self.host = Ledger(), Ledger()
        self._names: dict[int, str] = {}
        self._inside: list[str] = []
        self._stack = ExitStack()
        self.operators: Counter[Operator] = Counter()
        self.guesses = 0

    def name_modules(self, module: nn.Module) -> None:
        """Know the module's parts by their names, with "*" for each number in them."""
        self._names = {id(one): re.sub(r"\d+", "*", name) for name, one in module.named_modules()}

    def __enter__(self) -> Any:
        resize = _STORAGE.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            (self.host if self.host.knows(storage) else self.device).see(storage, self._origin("resize"))
            return done

        def restore() -> None:
            _STORAGE.resize_ = resize

        _STORAGE.resize_ = resized
        self._stack.callback(restore)
        for handle in (
            register_module_forward_pre_hook(self._begins),
            register_module_forward_hook(self._ends, always_call=True),
        ):
            self._stack.callback(handle.remove)
        made: Any = super()
        return made.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        made: Any = super()
        made.__exit__(*error)

    def begin(self) -> None:
        """Look for new peaks from here on, and count anew."""
        self.device.begin()
        self.host.begin()
        self.operators.clear()
        self.guesses = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is ASKS_DEVICE:  # the most frequent one
            return getattr(args[0], "fake_device", None) or func(*args)
        if args and isinstance(args[0], Tensor) and is_fake(args[0]):
            if func is READS_A_NUMBER:
                self.guesses += not args[0].dtype.is_floating_point
                return _read(args[0].dtype)
            if func is torch.ops.aten.equal.default:
                return True
            if func is torch.ops.aten.record_stream.default:
                return None
            if func is WAITS:
                return args[0]  # as it does; a fake one would be another tensor
            if func is PINS:
                func, args = torch.ops.aten.clone.default, args[:1]
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # a tensor that is spread over ranks: its parts on this rank come through here
        found = func(*args, **kwargs)
        name = operator_of(func)[1]
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            self._collective(name, list(tensors_in(args[0])), args[-1])
        results = list(tensors_in(found))
        for tensor in results if not func.is_view else ():
            self._see(tensor, name)
        if not (func.is_view or name.startswith(_MOVE_NOTHING)):
            given = list(tensors_in((*args, *kwargs.values())))
            flops = operator_flops(func, args, kwargs, found)
            dtype = str(given[0].dtype if given else torch.get_default_dtype()).removeprefix("torch.")
            self.operators[Operator(dtype, flops, sum(one.nbytes for one in (*given, *results)))] += 1
        return found

    def _begins(self, module: nn.Module, _: Any) -> None:
        self._inside.append(self._names.get(id(module), self._inside[-1] if self._inside else ""))

    def _ends(self, *_: Any) -> None:
        if self._inside:
            self._inside.pop()

    def _see(self, tensor: Tensor, name: str) -> None:
        for one in local_tensors(tensor):
            kind = kind_of(one)
            if kind != "meta":  # without memory
                ledger = self.device if kind == self._kind else self.host
                ledger.see(one.untyped_storage(), self._origin(name))

    def _origin(self, name: str) -> Origin:
        return Origin(self._inside[-1] if self._inside else "", name)


def _read(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return 1.0 if dtype.is_floating_point else 0  # an optimizer divides by what it makes of its count of steps
