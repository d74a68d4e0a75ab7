"""Refuses models that a job can't train, in `hpctrain check` and on the ranks."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from torch import nn

from hpctrain.base.errors import UsageError
from hpctrain.contracts.model import MetaModel, ModelSpec


def refuse_unsaved_buffers(module: nn.Module, spec: ModelSpec) -> None:
    """Raises UsageError for buffers that nobody would initialize: on the meta device no tensor has values."""
    saved = module.state_dict(keep_vars=True).keys()
    unsaved = [name for name, buffer in module.named_buffers() if name not in saved and buffer.is_meta]
    if isinstance(spec, MetaModel) and unsaved:
        raise UsageError(
            f"[model] {spec.name}: its buffer{'s' * (len(unsaved) > 1)} {', '.join(unsaved[:3])} would have no values: a "
            "MetaModel initializes only parameters and persistent buffers; register with persistent=True and "
            "initialize, or make on the CPU in build, or compute in forward, or derive from ModelSpec",
            everywhere=True,
        )


def refuse_embeddings(module: nn.Module, spec: ModelSpec, data_ranks: int) -> None:
    """Raises UsageError for embeddings that would train differently on several ranks."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = [(name or type(one).__name__, one) for name, one in module.named_modules() if isinstance(one, kinds)]
    sparse = [name for name, one in found if one.sparse]
    if sparse:
        raise UsageError(
            f"[model] {spec.name}: {', '.join(sparse)} makes sparse gradients, but gradients are summed over ranks in dense "
            "buffers; build it with sparse = False",
            everywhere=True,
        )
    scaled = [name for name, one in found if one.max_norm is not None]
    if scaled and data_ranks > 1:
        raise UsageError(
            f"[model] {spec.name}: {', '.join(scaled)} with max_norm changes its weight in forward, each rank for its own samples: "
            f"{data_ranks} data-parallel ranks would diverge; build it without max_norm, and scale its output",
            everywhere=True,
        )


def refuse_untrained(spec: ModelSpec, trained: Sequence[str]) -> None:
    """Raises UsageError for a model without a parameter to train."""
    if not trained:
        raise UsageError(
            f"[model] {spec.name}: it has no parameter to train: expected one at least with requires_grad = True"
        )


def refuse_unmatched(trained: Sequence[str], patterns: Sequence[dict[str, Any]]) -> None:
    """Raises UsageError for a pattern that matches none of the names of trained parameters."""
    for entry in patterns:
        for pattern in entry["pattern"]:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in trained):
                names = ", ".join(trained[:5])
                raise UsageError(
                    f"[[optimizer.groups]] pattern: no trained parameter matches {pattern!r}; the names are like {names}, ..."
                )
