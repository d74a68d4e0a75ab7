"""The tensor-parallel plan of a model of transformers, and the names of its modules where an adapter is in it."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping

from torch import nn

PREFIX = "base_model.model."
"""The place of the model of transformers in peft's."""
ADAPTER = "default"
"""The name that peft gives a model's first adapter."""
_OF_THE_BASE = re.compile(rf"\.(base_layer|original_module|modules_to_save\.{ADAPTER})(?=\.)")
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
_ROWS = "rowwise"


def base_name(name: str) -> str:
    """The name in the model of transformers that a parameter of the model with adapter had, or would have had."""
    return _OF_THE_BASE.sub("", name.removeprefix(PREFIX))


def is_tuned(module: nn.Module) -> bool:
    """Whether it is a layer of peft around a layer of the model."""
    return isinstance(getattr(module, "base_layer", None), nn.Module)


def tensor_plan(module: nn.Module, plan: Mapping[str, str], prefix: str) -> dict[str, str]:
    """The plan by the names of `module`, which has the model of transformers at `prefix` ("" or "base_model.model.").

    plan: transformers' own, styles by module pattern. A LoRA layer of y = W x + B A x is cut as its base: by columns W and B, whose
    outputs lie side by side; by rows W and A, which take parts of x. What is gathered or split anew around W needs no cut of A and
    B.
    """
    names = [name for name, _ in module.named_modules()]
    found: dict[str, str] = {}
    for pattern, style in plan.items():
        for name in fnmatch.filter(names, prefix + pattern):
            inner = module.get_submodule(name)
            if not is_tuned(inner):
                found[name] = style
                continue
            found[f"{name}.base_layer"] = style
            matrix = {"colwise": "lora_B", _ROWS: "lora_A"}.get(style)
            if matrix is not None and f"{name}.{matrix}.{ADAPTER}" in names:
                found[f"{name}.{matrix}.{ADAPTER}"] = style
    return found


def with_cut_vocabulary(
    plan: Mapping[str, str], module: nn.Module, head: str, embedding: str, tied: bool
) -> dict[str, str]:
    """The plan with logits that stay cut along the vocabulary up to the loss, which gathers none of them.

    head, embedding: names of the modules. tied: whether they share a matrix, which both then cut by rows.
    """
    if is_tuned(module.get_submodule(head)) or plan.get(head) not in _COLUMNS:
        return dict(plan)
    changed = {**plan, head: "vocabulary"}
    if tied:
        changed[embedding] = "embedding_rowwise"
    return changed
