"""Converts the tensor-parallel plans of transformers' models to this plugin's styles."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from hpctrain.api import UsageError

LOG = logging.getLogger("hpctrain")

# styles with another name in transformers 5; the names of transformers 4 are the same as here
_STYLES = {
    "colwise_gather_output": "colwise_rep",
    "rowwise_split_input": "rowwise_rep",
    "embedding_rowwise": "embedding",
    "embedding_colwise": "colwise_rep",
    "replicated_with_grad_allreduce": "head_norm",
}
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


def sequence_styles(module: nn.Module, cut: Collection[str]) -> dict[str, str]:
    """The styles, by module name, that cut activations between blocks along the sequence: what comes before the blocks sees whole
    ones. cut: the modules that the plan names. Raises UsageError for a model of another form."""
    lists = {_list_of(module, name) for name in cut} - {""}
    listed = max(lists, default="")
    before, outside = listed.rpartition(".")[0], [name for name in cut if not name.startswith(f"{listed}.")]
    last = [name for name, one in module.get_submodule(before).named_children() if _is_norm(one)]
    if len(lists) != 1 or len(last) != 1 or not any(name.endswith("head") for name in outside):
        raise _unfit(module, "which are its blocks, its last norm and its head")
    found = {f"{listed}.0": "split", f"{before}.{last[0]}".lstrip("."): "norm"}
    for inner, one in module.get_submodule(listed).named_modules():
        name, place = f"{listed}.{inner}", inner.split(".")
        if name in cut and len(place) > 2:
            found[f"{listed}.{place[0]}.{place[1]}"] = "gather"
        elif _is_norm(one) and len(place) == 2:
            found[name] = "norm"
        elif any(True for _ in one.parameters(recurse=False)):
            raise _unfit(module, f"how {name} is cut")
    return found


def _list_of(module: nn.Module, name: str) -> str:
    """The name of the list of blocks that a module lies in, "" if it lies in none."""
    parts = name.split(".")
    over = (".".join(parts[:length]) for length in range(1, len(parts)))
    return next((one for one in over if isinstance(module.get_submodule(one), nn.ModuleList)), "")


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def _unfit(module: nn.Module, lacks: str) -> UsageError:
    return UsageError(
        f"[parallelism.tensor] sequence_parallel: the plan of a {type(module).__name__} doesn't tell {lacks}; expected a plan that "
        "cuts the activations of all blocks: leave sequence_parallel out, or write [parallelism.tensor] plan"
    )
