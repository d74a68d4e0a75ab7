"""An accelerator without memory, on which a plan computes as on a GPU: shapes only, on any machine.

torch finds in it what it asks of CUDA: streams, random numbers, autocast with the same operators, attention without score matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpctrain.base.errors import EnvironmentUnfitError
from hpctrain.base.torch_private import operator_of
from hpctrain_tools.plan.torch_fake import (
    EFFICIENT_ATTENTION,
    FLASH_ATTENTION,
    PLAIN_ATTENTION,
    add_device,
    arguments_of,
    autocast_operators,
    implement,
    kind_of,
    without_autocast,
)

KIND = "planned"
_HALF = torch.bfloat16, torch.float16

# operators that autocast runs in the lower precision, as torch documents them for CUDA
_LOWER = {
    *("linear", "matmul", "mm", "mv", "bmm", "addmm", "addmv", "addbmm", "baddbmm", "addr", "chain_matmul", "einsum"),
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
    *("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose", "prelu"),
    *("linalg_multi_dot", "linalg_vecdot", "gru_cell", "lstm_cell", "rnn_relu_cell", "rnn_tanh_cell"),
    *("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "scaled_dot_product_attention", "_scaled_dot_product_flash_attention"),
}  # fmt: skip
# operators whose inputs get the widest type among them
_WIDEST = {
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "vdot",
    "grid_sampler",
    "index_put",
    "tensordot",
} | {"scatter_add"}
# operators that make float32 of inputs of another type. All others get inputs in float32.
_WITH_DTYPE = {"prod", "softmax", "log_softmax", "cumprod", "cumsum", "sum", "linalg_vector_norm", "linalg_matrix_norm"}


def planned_accelerator() -> torch.device:
    """The device, for the rest of this process. Raises EnvironmentUnfitError where torch has no room for it."""
    if not add_device(KIND, _Module()):
        raise EnvironmentUnfitError(
            "a package has added a device of its vendor to torch, which takes one only, and a plan needs that place; plan in an "
            "environment without it, or with --machine FILE that has accelerator = false: then the operators are those of the CPU"
        )
    cache: dict[int, tuple[Tensor, Tensor]] = {}

    def autocast(operator: Any) -> Callable[..., Any]:
        return _under_autocast(operator, cache)

    implement(autocast_operators(), autocast, autocast=True)
    implement([torch.ops.aten.scaled_dot_product_attention.default], lambda _: _attention, autocast=False)
    torch.clear_autocast_cache = cache.clear  # where a context of autocast ends, torch forgets what it has cast
    device = torch.device(KIND, 0)
    names: Any = torch
    names.Stream, names.Event = _Stream, _Event
    torch.accelerator.current_stream = lambda *_: _Stream(device)
    torch.accelerator.synchronize = lambda *_: None
    return device


class _Event(torch.Event):
    """An event for which nobody has to wait."""

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class _Stream(torch.Stream):
    """A stream whose work is done."""

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        return event or _Event(self.device)

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class _Module:
    """The module of the device, as torch has one for each kind. Work is done when it is launched."""

    Stream, Event = _Stream, _Event

    def __init__(self) -> None:
        self._device = 0

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def _lazy_init(self) -> None:
        return

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return self._device

    def set_device(self, device: Any) -> None:
        self._device = device if isinstance(device, int) else torch.device(device).index or 0

    def synchronize(self, *_: Any) -> None:
        return

    def current_stream(self, *_: Any) -> Any:
        return torch.accelerator.current_stream()

    default_stream = current_stream

    @contextmanager
    def stream(self, stream: Any) -> Iterator[Any]:
        yield stream

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return list(_HALF)

    def is_bf16_supported(self) -> bool:
        return True

    def get_rng_state(self, *_: Any) -> Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, *_: Any) -> None:
        return

    manual_seed = manual_seed_all = set_rng_state


def _under_autocast(operator: Any, cache: dict[int, tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    """Run an operator as autocast on CUDA does. cache: the parameters that have been cast."""
    name = operator_of(operator)[1]
    takes_dtype = name in _WITH_DTYPE and "dtype" in arguments_of(operator)

    def run(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            given = [*args, *kwargs.values()]
            if takes_dtype:
                place = arguments_of(operator).index("dtype")
                if len(args) <= place and kwargs.get("dtype") is None and _floats(given):
                    kwargs["dtype"] = torch.float32
                return operator(*args, **kwargs)
            to: torch.dtype | None = torch.float32
            if name in _LOWER:
                to = torch.get_autocast_dtype(KIND)
            elif name in _WIDEST and not any(one.dtype == torch.float32 for one in _floats(given)):
                to = None
            return operator(
                *(_cast(one, to, cache) for one in args), **{key: _cast(one, to, cache) for key, one in kwargs.items()}
            )

    return run


def _floats(given: Sequence[Any]) -> list[Tensor]:
    """The tensors that autocast may cast: not those of float64, and not the host's."""
    found = [inner for one in given for inner in (one if isinstance(one, (list, tuple)) else [one])]
    return [
        one
        for one in found
        if isinstance(one, Tensor) and kind_of(one) == KIND and one.dtype in (*_HALF, torch.float32)
    ]


def _cast(given: Any, to: torch.dtype | None, cache: dict[int, tuple[Tensor, Tensor]]) -> Any:
    if isinstance(given, (list, tuple)):
        return type(given)(_cast(one, to, cache) for one in given)
    if to is None or not _floats([given]) or given.dtype == to:
        return given
    kept = to in _HALF and given.is_leaf and given.requires_grad and torch.is_autocast_cache_enabled()
    if kept and id(given) in cache:
        return cache[id(given)][1]
    made = given.to(to)
    if kept:
        cache[id(given)] = given, made
    return made


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Choose as torch does on CUDA: FlashAttention, with a mask or in float32 the memory-efficient operator.

    query: (batch, heads, seq, channels).
    """
    if enable_gqa:
        key, value = (one.repeat_interleave(query.size(-3) // one.size(-3), -3) for one in (key, value))
    if query.dtype == torch.float64 or query.dim() != 4:
        return PLAIN_ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is None and query.dtype in _HALF and query.size(-1) <= 256:
        return FLASH_ATTENTION(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    mask = attn_mask
    if mask is not None:
        mask = torch.zeros_like(mask, dtype=query.dtype) if mask.dtype == torch.bool else mask
        mask = mask.expand(*query.shape[:-1], key.size(-2))
    return EFFICIENT_ATTENTION(query, key, value, mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
