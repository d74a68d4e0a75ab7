"""torch's private names around tensors without values: torch's fake ones, and a device that has no memory.

A plan computes on such a device. As in hpctrain/base/torch_private.py, torch may change these names without notice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# operators that return nothing and of which torch does not know that they need no values, unlike Adam's
_IN_PLACE = ("aten._fused_sgd_", "aten._fused_adagrad_")

_RNN_LAYER = torch.ops.aten.mkldnn_rnn_layer.default
# bytes by the shapes and the other arguments of a recurrent layer
_WORKSPACES: dict[tuple[Any, ...], int] = {}


def kind_of(tensor: Tensor) -> str:
    """The kind of a tensor's device. A fake tensor's `device` asks torch's dispatcher, which takes as long as an operator."""
    device: torch.device = getattr(tensor, "fake_device", None) or tensor.device
    return device.type


def needs_values(error: Exception) -> bool:
    """Whether an operator of fake tensors has failed because it needs their values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    kinds = DataDependentOutputException, DynamicOutputShapeException
    return isinstance(error, kinds) or "not supported for tensor subclasses" in str(error)


def without_modes() -> AbstractContextManager[Any]:
    """A context in which operators are those of real tensors, also inside a mode that makes fake ones."""
    from torch.utils._python_dispatch import _disable_current_modes

    made: AbstractContextManager[Any] = _disable_current_modes()
    return made


def fake_tensors() -> AbstractContextManager[Any]:
    """A context in which tensors are made without values and without memory; real ones may be mixed in."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Shapes(FakeTensorMode):
        """A mode whose cache keeps no storage alive that is an operator's argument, and that makes nothing on a device itself: an
        added one has no operators."""

        avoid_device_init = True

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func.overloadpacket) in _IN_PLACE:
                return None
            cached = self.cache_enabled
            self.cache_enabled = cached and not any(isinstance(one, torch.UntypedStorage) for one in args)
            try:
                found: Any = super().dispatch(func, types, args, kwargs)
            finally:
                self.cache_enabled = cached
            if func is _RNN_LAYER and torch.is_grad_enabled():
                found = (*found[:-1], found[-1].new_empty(_workspace_bytes(args)))
            return found

    made: AbstractContextManager[Any] = Shapes(allow_non_fake_inputs=True)
    return made


def _workspace_bytes(args: Iterable[Any]) -> int:
    """The memory that a recurrent layer keeps for its backward on a CPU. Only its kernel knows, so that runs once for each kind of
    call: torch's fake result has no bytes."""
    shapes = tuple((tuple(one.shape), one.dtype) if isinstance(one, Tensor) else str(one) for one in args)
    if shapes not in _WORKSPACES:
        with without_modes(), torch.enable_grad():
            zeros = (torch.zeros(one.shape, dtype=one.dtype) if isinstance(one, Tensor) else one for one in args)
            _WORKSPACES[shapes] = _RNN_LAYER(*zeros)[-1].nbytes
    return _WORKSPACES[shapes]


def local_tensors(tensor: Tensor) -> list[Tensor]:
    """The plain tensors with a tensor's memory on this rank: of a DTensor and of other wrappers what they hold."""
    if type(tensor) in (Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    held = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
    return [inner for one in held if isinstance(one, Tensor) for inner in local_tensors(one)]


def storage_number(storage: torch.UntypedStorage) -> int:
    """A number that no other storage has as long as this one lives."""
    return int(storage._cdata)


READS_A_NUMBER = torch.ops.aten._local_scalar_dense.default
"""The operator of `.item()`."""


def add_device(name: str, module: Any) -> bool:
    """Give torch a kind of device `name` on which fake tensors can be differentiated, with `module` as torch's module for it.

    It lasts as long as the process. False if a vendor's package has added a device: torch takes one only.
    """
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    if torch._C._get_privateuse1_backend_name() != "privateuseone":
        return False
    _setup_privateuseone_for_python_backend(name, module)
    others, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    own.impl("empty.memory_format", _empty, "PrivateUse1")
    _LIBRARIES.extend((others, own))
    return True


def _empty(size: tuple[int, ...], *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """A tensor on the added device outside of the mode that makes fake ones: it has no memory."""
    made: Tensor = torch._C._acc.create_empty_tensor(size, dtype or torch.get_default_dtype())
    return made


# the implementations of operators last as long as these
_LIBRARIES: list[torch.library.Library] = []


def implement(operators: Iterable[Any], make: Callable[[Any], Callable[..., Any]], autocast: bool) -> None:
    """Implement operators of the added device: make(operator) is what runs, under autocast or before differentiation."""
    library = torch.library.Library("aten", "IMPL")
    for one in operators:
        library.impl(one, make(one), "AutocastPrivateUse1" if autocast else "AutogradPrivateUse1")
    _LIBRARIES.append(library)


def autocast_operators() -> list[Any]:
    """The operators that autocast on CUDA knows, which this torch need not be built with."""
    found = []
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::"):
            found.append(getattr(getattr(torch.ops.aten, packet), overload or "default"))
    return found


def without_autocast() -> AbstractContextManager[Any]:
    """A context in which operators of the added device run as outside of autocast."""
    keys: Any = torch._C.DispatchKey  # its types lack this one
    key = torch._C.DispatchKeySet(keys.AutocastPrivateUse1)
    made: AbstractContextManager[Any] = torch._C._ExcludeDispatchKeyGuard(key)
    return made


def arguments_of(overload: Any) -> list[str]:
    """The names of an operator's arguments."""
    return [one.name for one in overload._schema.arguments]


@contextmanager
def foreach_of_fakes() -> Iterator[None]:
    """Let optimizers treat fake tensors as they treat real ones: several at a time on accelerators."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.optim.optimizer import _foreach_supported_types

    kinds: list[Any] = _foreach_supported_types
    kinds.append(FakeTensor)
    try:
        yield
    finally:
        kinds.remove(FakeTensor)


@contextmanager
def shapes_of_dtensors() -> Iterator[None]:
    """Let DTensor find the shapes of its results where no mode sees it: it runs operators on fake tensors of the whole
    shapes."""
    if "torch.distributed.tensor" not in sys.modules:  # a slow import
        yield
        return
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    kind: Any = ShardingPropagator
    find = kind._propagate_tensor_meta_non_cached

    def unseen(self: Any, schema: Any) -> Any:
        with without_modes():
            return find(self, schema)

    kind._propagate_tensor_meta_non_cached = unseen
    try:
        yield
    finally:
        kind._propagate_tensor_meta_non_cached = find


def resolve_group(name: str) -> dist.ProcessGroup:
    """The group that a functional collective names."""
    from torch._C._distributed_c10d import _resolve_process_group

    resolve: Any = _resolve_process_group  # its argument has a type of its own since torch 2.13
    found: dist.ProcessGroup = resolve(name)
    return found


ASKS_DEVICE = torch.ops.prim.device.default
"""The operator of `.device`, where a mode or a tensor of a kind of its own answers."""
PINS = torch.ops.aten._pin_memory.default
"""The operator of `.pin_memory()`."""
WAITS = torch.ops._c10d_functional.wait_tensor.default
"""The operator that waits for a functional collective."""
FLASH_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention.default
EFFICIENT_ATTENTION = torch.ops.aten._scaled_dot_product_efficient_attention.default
PLAIN_ATTENTION = torch.ops.aten._scaled_dot_product_attention_math.default
