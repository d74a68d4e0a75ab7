"""Where a tensor-parallel plan comes from, and which modules its patterns mean."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from torch import nn

from hpctrain.api import ModelSpec, UsageError
from hpctrain_plugins.parallelism.tensor.blocks import plan_of_blocks
from hpctrain_plugins.parallelism.tensor.cut import Cut, Entry
from hpctrain_plugins.parallelism.tensor.hugging_face import hugging_face_plan
from hpctrain_plugins.parallelism.tensor.styles import STYLES

LOG = logging.getLogger("hpctrain")
_PLAN: TypeAdapter[dict[str, Cut]] = TypeAdapter(dict[str, Entry])


def plan_for(module: nn.Module, spec: ModelSpec, given: Mapping[str, Cut], size: int) -> dict[str, Cut]:
    """The cut by module name: from the job, else the model, else its Hugging Face style plan, else its plain blocks.

    Raises UsageError for a pattern that matches nothing, an unknown style, or a model that nothing is known of.
    """
    plan = given or _read(spec.tensor_plan() or hugging_face_plan(module), spec)
    if plan:
        return expand(module, plan)
    found = plan_of_blocks(module, size)
    if not found:
        raise UsageError(
            f"the model {spec.name!r} has no tensor_plan, and no attention or MLP was found in it to make one from; "
            'write [parallelism.tensor] plan = { "layers.*.mlp.up" = "colwise", ... }',
            everywhere=True,
        )
    LOG.info("tensor parallelism, worked out: %s", {n: c.model_dump(exclude_none=True) for n, c in found.items()})
    return found


def _read(plan: Mapping[str, Any], spec: ModelSpec) -> dict[str, Cut]:
    """A plan that the model brings."""
    try:
        return _PLAN.validate_python(dict(plan))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise UsageError(
            f"the tensor_plan of the model {spec.name!r}: {'.'.join(map(str, first['loc']))}: {first['msg']}",
            everywhere=True,
        ) from error


def expand(module: nn.Module, plan: Mapping[str, Cut]) -> dict[str, Cut]:
    """Patterns (fnmatch, where * stands for any part of a name) to module names."""
    names = [name for name, _ in module.named_modules() if name]
    expanded: dict[str, Cut] = {}
    for pattern, cut in plan.items():
        if cut.style not in STYLES:
            raise UsageError(
                f"[parallelism.tensor] plan: found the style {cut.style!r} for {pattern!r}, expected one of "
                f"{', '.join(STYLES)}",
                everywhere=True,
            )
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise UsageError(
                f"[parallelism.tensor] plan: no module matches {pattern!r}; the names are like "
                f"{', '.join(names[:6])}, ...",
                everywhere=True,
            )
        expanded |= dict.fromkeys(matched, cut)
    return expanded
