"""Finds the tensor-parallel plan of a model, and resolves its patterns to modules."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import nn

from hpctrain.api import ModelSpec, TensorParallelModel, UsageError
from hpctrain_plugins.parallelism.tensor.blocks import plan_of_blocks
from hpctrain_plugins.parallelism.tensor.cut import Cut, StyleOrCut
from hpctrain_plugins.parallelism.tensor.hugging_face import hugging_face_plan, sequence_styles
from hpctrain_plugins.parallelism.tensor.styles import STYLES

LOG = logging.getLogger("hpctrain")
_PLAN: TypeAdapter[dict[str, Cut]] = TypeAdapter(dict[str, StyleOrCut])


def plan_for(
    module: nn.Module, spec: ModelSpec, given: Mapping[str, Cut], size: int, sequence: bool = False
) -> dict[str, Cut]:
    """The cut by module name: from the job, else the model, else its Hugging Face plan, else its plain blocks.

    sequence: whether activations are cut, too. Raises UsageError for a pattern that matches nothing, an unknown style, or a model
    without any of these.
    """
    if given:
        return expand(module, given, "[parallelism.tensor] plan")
    brought = spec.tensor_plan() if isinstance(spec, TensorParallelModel) else hugging_face_plan(module)
    plan = _read(brought, spec)
    if plan:
        found = expand(module, plan, f"the tensor plan that the model {spec.name!r} brings")
        if sequence and not isinstance(spec, TensorParallelModel):
            found |= _read(sequence_styles(module, found), spec)
        return found
    if sequence:
        raise UsageError(
            f"[parallelism.tensor] sequence_parallel: the model {spec.name!r} brings no plan, and a derived one cuts no "
            "activations between blocks; leave sequence_parallel out, or write [parallelism.tensor] plan"
        )
    found = plan_of_blocks(module, size)
    if not found:
        raise UsageError(
            f"the model {spec.name!r} has no tensor_plan, and no attention or MLP was found in it to make one from; "
            'write [parallelism.tensor] plan = { "layers.*.mlp.up" = "colwise", ... }'
        )
    LOG.info("tensor parallelism, derived plan: %s", {n: c.model_dump(exclude_none=True) for n, c in found.items()})
    return found


def _read(plan: Mapping[str, Any], spec: ModelSpec) -> dict[str, Cut]:
    """Parse a plan of the model."""
    try:
        return _PLAN.validate_python(dict(plan))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(
            f"the tensor_plan of the model {spec.name!r}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from error


def expand(module: nn.Module, plan: Mapping[str, Cut], source: str) -> dict[str, Cut]:
    """Resolve patterns (fnmatch: * matches any part of a name) to module names. source: what the plan is, for messages."""
    names = [name for name, _ in module.named_modules() if name]
    expanded: dict[str, Cut] = {}
    for pattern, cut in plan.items():
        if cut.style not in STYLES:
            raise UsageError(
                f"{source}: found the style {cut.style!r} for {pattern!r}, expected one of {', '.join(STYLES)}"
            )
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise UsageError(
                f"{source}: no module matches {pattern!r}; the names are like {', '.join(names[:6])}, ..."
                + ("" if source.startswith("[") else "; write [parallelism.tensor] plan with such names")
            )
        expanded |= dict.fromkeys(matched, cut)
    return expanded
