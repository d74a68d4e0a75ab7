"""The parameters that a loss follows from."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from hpctrain.base.errors import TrainingError


def parameters_behind(loss: Tensor) -> list[nn.Parameter]:
    """The parameters to which a backward of the loss would add gradients. Takes as long as its graph is large."""
    seen, found = set[Any](), list[nn.Parameter]()
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            found.append(leaf)
        waiting += [following for following, _ in node.next_functions]
    return found


def refuse_strangers(behind: Iterable[nn.Parameter], modules: Collection[nn.Module]) -> None:
    """Raises TrainingError if a backward has left a gradient in a parameter of none of the modules: nobody would sum it."""
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    strangers = [one for one in behind if id(one) not in known and one.grad is not None]
    if strangers:
        shapes = ", ".join(str(tuple(one.shape)) for one in strangers[:3])
        raise TrainingError(
            f"backward: the loss follows from parameters that were not set up, of the shape {shapes}: their gradients would differ "
            "from rank to rank; give their module to loop.setup, or freeze it with requires_grad_(False)"
        )
