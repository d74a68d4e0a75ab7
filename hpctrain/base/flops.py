"""Floating-point operations of operators, as torch counts them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from hpctrain.base.torch_private import TorchDispatchMode, is_fake, operator_of

# torch's counter of an operator that its registry lacks, and of how many first arguments it takes the shapes
_CPU_ATTENTION: dict[str, tuple[Callable[..., int], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}
# kernels of recurrent layers, which are not in torch's registry either; each has one with _backward for its gradients
_RECURRENT = "mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"


def operator_flops(overload: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], found: Any) -> int:
    """The floating-point operations of an operator's call that gave `found`; 0 for operators other than products."""
    operator, name = operator_of(overload)
    if name in _CPU_ATTENTION:
        count, tensors = _CPU_ATTENTION[name]
        return int(count(*(tensor.shape for tensor in args[:tensors])))
    if name.removesuffix("_backward") in _RECURRENT:
        return _recurrent_flops(*args[:3]) * (2 if name.endswith("_backward") else 1)
    return int(flop_registry[operator](*args, **kwargs, out_val=found)) if operator in flop_registry else 0


def _recurrent_flops(given: Tensor, weights: Tensor | list[Tensor], others: Any) -> int:
    """Operations of the products with matrices: each token meets each number of them once.

    given: (seq, batch, features), (batch, seq, features) or (tokens, features). weights: of all layers, or the first matrix of one
    layer, of which `others` is the second then.
    """
    every = weights if isinstance(weights, list) else [weights, others]
    tokens = given.numel() // given.shape[-1]
    return 2 * tokens * sum(matrix.numel() for matrix in every if matrix.dim() == 2)


class CountedFlops(TorchDispatchMode):
    """A mode that counts operations while `counts()` is true."""

    def __init__(self, counts: Callable[[], bool]) -> None:
        made: Any = super()  # torch leaves the mode's methods without types
        made.__init__()
        self._counts, self.total = counts, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a tensor that is spread over ranks: its parts on this rank come through here
        found = func(*args, **(kwargs or {}))
        # DTensor asks for the shape of a result by tensors without values
        if self._counts() and not (isinstance(found, Tensor) and is_fake(found)):
            self.total += operator_flops(func, args, kwargs or {}, found)
        return found
