"""Converts the tensor-parallel plans of transformers' models to this plugin's styles."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import nn

LOG = logging.getLogger("hpctrain")

_STYLES = {
    "colwise_gather_output": "colwise_rep",
    "rowwise_split_input": "rowwise_rep",
    "embedding_rowwise": "rowwise",
    "embedding_colwise": "colwise_rep",
    "replicated_with_grad_allreduce": "head_norm",
}
"""Styles with another name in transformers 5; the names of transformers 4 are the same as here."""
_WHOLE = "replicate"
_EXPERTS = "moe_tp_experts"


def hugging_face_plan(module: nn.Module) -> Mapping[str, Any]:
    """`_tp_plan` of a model, or `base_model_tp_plan` of its config; empty if it has neither.

    Experts are parameters, not modules; every rank keeps them whole.
    """
    plan = getattr(module, "_tp_plan", None) or getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    if not isinstance(plan, Mapping):
        return {}
    experts = [pattern for pattern, style in plan.items() if style == _EXPERTS]
    if experts:
        LOG.warning("[parallelism.tensor] %s: experts are not cut and stay whole on every rank", " and ".join(experts))
    return {
        pattern: _STYLES.get(style, style)
        for pattern, style in plan.items()
        if style != _WHOLE and not any(f"{pattern}.".startswith(f"{of}.") for of in experts)
    }
