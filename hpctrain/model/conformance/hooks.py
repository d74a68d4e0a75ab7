"""Hooks and metrics look at the model, its outputs and rows; what they change, they must say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from hpctrain.base.errors import ContractError
from hpctrain.base.torch_private import versions
from hpctrain.contracts.life_cycle import LiveModel
from hpctrain.contracts.metric import Metric
from hpctrain.contracts.model import tensors_in
from hpctrain.contracts.plugin import broken


class _Model(LiveModel, Protocol):
    refreshed: int
    """The calls of `refresh` so far."""


@contextmanager
def weights_kept(model: _Model, hook: str, who: Sequence[str]) -> Iterator[None]:
    """A context of a hook's calls. Raises ContractError if one changed weights in place and did not call `model.refresh`.

    who: the plugins that implement the hook.
    """
    before, refreshed = _versions(model), model.refreshed
    yield
    if model.refreshed == refreshed and _versions(model) != before:
        raise ContractError(
            f"{' or '.join(who)} changed weights of the model in {hook}, expected changes of `piece.tensor` only, and "
            "`model.refresh()` after them: without it ranks train on other weights"
        )


def _versions(model: LiveModel) -> list[int]:
    """The changes in place of each parameter and piece so far, as torch counts them."""
    return versions([*model.module.parameters(), *(piece.tensor for piece in model.pieces)])


@contextmanager
def tensors_kept(who: str, *values: Any) -> Iterator[None]:
    """A context of a call that must not change the tensors in `values`. Raises ContractError if it did."""
    tensors = [one for one in tensors_in(values) if not one.is_inference()]
    before = versions(tensors)
    yield
    if versions(tensors) != before:
        raise ContractError(
            f"{who} changed the model's outputs or the batch in place, expected it to leave them alone: use a copy"
        )


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6) or (math.isnan(one) and math.isnan(other))


def refuse_different_values(metric: Metric, values: Sequence[dict[str, float]]) -> None:
    """Raises ContractError on all ranks unless a metric is equal on all ranks that had outputs. values: by rank."""
    for found in values[1:]:
        if found.keys() != values[0].keys() or not all(_is_close(found[name], values[0][name]) for name in found):
            raise broken(
                metric,
                f"computed {values[0]} on one rank and {found} on another",
                "equal values: sum over the group",
            )
