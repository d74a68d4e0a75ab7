"""Where a tensor-parallel plan comes from, and which modules its patterns mean."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

from torch import nn

from hpctrain.api import ModelSpec, UsageError
from hpctrain_plugins.parallelism.tensor.blocks import plan_of_blocks
from hpctrain_plugins.parallelism.tensor.styles import STYLES

Plan = Mapping[str, str]


def plan_for(module: nn.Module, spec: ModelSpec, given: Plan) -> dict[str, str]:
    """Style by module name: from the job, else the model, else its Hugging Face style plan, else its plain blocks.

    Raises UsageError for a pattern that matches nothing, an unknown style, or a model that nothing is known of.
    """
    plan = given or spec.tensor_plan() or _hugging_face_plan(module)
    if plan:
        return expand(module, plan)
    found = plan_of_blocks(module, spec)
    if not found:
        raise UsageError(
            f"the model {spec.name!r} has no tensor_plan, and no attention or MLP was found in it to make one from; "
            'write [parallelism.tensor] plan = { "layers.*.mlp.up" = "colwise", ... }'
        )
    return found


def expand(module: nn.Module, plan: Plan) -> dict[str, str]:
    """Patterns (fnmatch, where * stands for any part of a name) to module names."""
    names = [name for name, _ in module.named_modules() if name]
    expanded: dict[str, str] = {}
    for pattern, style in plan.items():
        if style not in STYLES:
            raise UsageError(
                f"[parallelism.tensor] plan: found the style {style!r} for {pattern!r}, expected one of "
                f"{', '.join(STYLES)}"
            )
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise UsageError(
                f"[parallelism.tensor] plan: no module matches {pattern!r}; the names are like "
                f"{', '.join(names[:6])}, ..."
            )
        expanded |= dict.fromkeys(matched, style)
    return expanded


def _hugging_face_plan(module: nn.Module) -> Plan:
    """What transformers' models carry: `_tp_plan`, or the config's `base_model_tp_plan`."""
    plan = getattr(module, "_tp_plan", None) or getattr(getattr(module, "config", None), "base_model_tp_plan", None)
    return plan if isinstance(plan, Mapping) else {}
