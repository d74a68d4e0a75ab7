"""Works a plan out for a foreign module whose attention and MLP are plain Linear layers with the usual names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from hpctrain.api import ModelSpec

_INTO = re.compile(r"^(q|k|v|query|key|value|gate|up|fc1|fc_in|w1|w3|c_fc|dense_h_to_4h|linear1|wq|wk|wv)(_?proj)?$")
_OUT = re.compile(r"^(o|out|output|down|fc2|fc_out|w2|c_proj|dense_4h_to_h|linear2|wo)(_?proj)?$")
HEADS = ("num_heads", "n_heads", "n_head", "heads", "num_attention_heads", "num_key_value_heads", "n_kv_heads")
"""Attributes that count the heads of an attention; a rank has its share of them."""


def plan_of_blocks(module: nn.Module, spec: ModelSpec) -> dict[str, str]:
    """colwise and rowwise for every module that has Linear children going in and one coming out."""
    plan: dict[str, str] = {}
    for name, inner in module.named_modules():
        linears = {key: child for key, child in inner.named_children() if isinstance(child, nn.Linear)}
        into = [key for key in linears if _INTO.match(key)]
        out = [key for key in linears if _OUT.match(key)]
        if into and len(out) == 1 and len({linears[key].out_features for key in into}) <= 2:
            path = f"{name}." if name else ""
            plan |= {path + key: "colwise" for key in into} | {path + out[0]: "rowwise"}
        elif not into and not out:
            plan |= dict(_sequence(name, inner))
    return plan


def _sequence(name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """An nn.Sequential of Linear, anything element by element, Linear is an MLP."""
    if not isinstance(module, nn.Sequential):
        return
    linears = [(key, child) for key, child in module.named_children() if isinstance(child, nn.Linear)]
    if len(linears) == 2 and linears[0][1].out_features == linears[1][1].in_features:
        yield f"{name}.{linears[0][0]}", "colwise"
        yield f"{name}.{linears[1][0]}", "rowwise"


def share_heads(module: nn.Module, plan: dict[str, str], size: int) -> None:
    """An attention that knows its heads by number has only its share of them on a rank."""
    parents = {name.rpartition(".")[0] for name, style in plan.items() if style == "colwise"}
    for name in parents:
        inner = module.get_submodule(name)
        for attribute in HEADS:
            value = getattr(inner, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool):
                setattr(inner, attribute, value // size)
