"""`selective` keeps the outputs of expensive operators (matrix products, attention) and computes the cheap ones again
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hpctrain.api import (
    ActivationCheckpointing,
    Field,
    ModelSpec,
    Options,
    Plan,
    Problem,
    TorchDispatchMode,
    UsageError,
    hookimpl,
    is_mutable,
)
from hpctrain_plugins.activation_checkpointing.blocks import FULL, BlockBuffers, blocks_of

_PRODUCTS = ["mm", "addmm", "bmm", "baddbmm", "_scaled_mm"]
_EXPENSIVE = [
    *_PRODUCTS,
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
]


class SelectiveOptions(Options):
    keep: list[str] = Field(default=_EXPENSIVE, description="operators (torch.ops.aten names) whose outputs are kept")
    keep_every: int = Field(
        default=1, ge=1, description="of a block's matrix products, keep the first and every n-th after it"
    )


class Selective(ActivationCheckpointing):
    """Recompute blocks in backward, except for some operators."""

    name = "selective"
    is_compiled = True  # in compiled code, operators are not visible from outside
    Options = SelectiveOptions
    options: SelectiveOptions

    def memory_advice(self, ranks: int, device: torch.device) -> list[str]:
        return [*(["[activation_checkpointing] keep_every = 2"] if self.options.keep_every == 1 else []), FULL]

    def problems(self, plan: Plan) -> list[Problem]:
        split = [name for name, plugin in plan.parallelism.items() if plugin.traits.splits_backward]
        if split:  # torch's selective checkpoint gives kept outputs to one backward only
            why = f"the schedule of {split[0]} splits the backward of a block, and kept outputs can be used only once"
            return [Problem(f'{why}; use mode = "full", or another schedule')]
        unknown = [name for name in self.options.keep if not hasattr(torch.ops.aten, name)]
        if unknown:
            raise UsageError(
                f"[activation_checkpointing] keep: torch has no operator {', '.join(unknown)}; expected names such as mm "
                "or addmm"
            )
        if plan.outline is not None:
            blocks_of(plan.outline, plan.model, self.name)
        return []

    def apply(self, module: nn.Module, spec: ModelSpec, replicas: DeviceMesh | None) -> None:
        blocks = blocks_of(module, spec, self.name)
        choice = {getattr(torch.ops.aten, name) for name in self.options.keep}, self.options.keep_every
        for block in blocks:
            # replaces the bound method instead of wrapping the module, so parameter names do not change
            block.forward = partial(_recomputed, choice, BlockBuffers(block).contexts, block.forward)


def _recomputed(
    choice: tuple[set[Any], int], sparing: Callable[[], Any], forward: Callable[..., Any], *inputs: Any, **options: Any
) -> Any:
    # a frame of our own: Dynamo skips the frames of torch.utils.checkpoint and everything called from them
    contexts: Callable[[], Any] = partial(_both, sparing, partial(_selecting, *choice))
    if torch.compiler.is_compiling():
        contexts = partial(_strictly_selecting, *choice)
    return checkpoint(forward, *inputs, use_reentrant=False, context_fn=contexts, **options)


def _strictly_selecting(kept: set[Any], every: int) -> tuple[Any, Any]:
    """torch's own `context_fn`, which fails if backward runs an operator that forward did not run."""
    products, counts = {getattr(torch.ops.aten, name) for name in _PRODUCTS}, [0]

    def policy(_: Any, operator: Any, *inputs: Any, **options: Any) -> CheckpointPolicy:
        is_kept = _is_kept(operator, kept)
        if is_kept and operator.overloadpacket in products:
            is_kept, counts[0] = counts[0] % every == 0, counts[0] + 1
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-any-return]


def _is_kept(operator: Any, kept: set[Any]) -> bool:
    """Whether the outputs may be kept. Not if they lie in the caller's memory (`mm(out=)` in compiled code), which may change."""
    return getattr(operator, "overloadpacket", None) in kept and not is_mutable(operator)


def _selecting(kept: set[Any], every: int) -> tuple[Any, Any]:
    keeping, giving = _strictly_selecting(kept, every)
    return keeping, _Again(kept, giving)


class _Again(TorchDispatchMode):
    """Takes kept outputs from `giving`, which computes those of the same operators that it has not, and computes everything else.

    The rest may differ from what forward computed: a unit of stage 3 inside a block may be gathered here although it was
    already gathered in forward, or the other way round.
    """

    def __init__(self, kept: set[Any], giving: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._giving = kept, giving

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_kept(func, self._kept):
            return self._giving.__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def _both(
    outer: Callable[[], Any], inner: Callable[[], Any]
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Combines two `context_fn`s. Compiled code needs only the inner one: it writes buffers once, at its end."""
    (outer_forward, outer_again), (inner_forward, inner_again) = outer(), inner()
    return _nested(outer_forward, inner_forward), _nested(outer_again, inner_again)


@contextmanager
def _nested(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


@hookimpl
def hpctrain_activation_checkpointing() -> list[type[ActivationCheckpointing]]:
    return [Selective]
