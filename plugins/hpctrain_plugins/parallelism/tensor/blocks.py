"""Derives a plan for a module of a user whose attention and MLP are plain Linear layers with common names."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence

from torch import nn

from hpctrain_plugins.parallelism.tensor.cut import Cut, linear_of
from hpctrain_plugins.parallelism.tensor.trial import adds_up, parameters_between

LOG = logging.getLogger("hpctrain")

_INTO = re.compile(r"^(q|k|v|query|key|value|gate|up|fc1|fc_in|w1|w3|c_fc|dense_h_to_4h|linear1|wq|wk|wv)(_?proj)?$")
_FUSED_ATTENTION = re.compile(r"^(qkv(_?proj)?|c_attn|[wW]qkv)$")
_FUSED_MLP = re.compile(r"^gate_up(_?proj)?$")
_OUT = re.compile(r"^(o|out|output|down|fc2|fc_out|w2|c_proj|dense_4h_to_h|linear2|wo)(_?proj)?$")
# attributes with the number of heads of an attention; a rank has its share of them
_HEADS = (
    "num_heads", "n_heads", "n_head", "heads", "num_attention_heads",
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head",
)  # fmt: skip
# attributes with the split sizes of a fused projection's output; a rank has its share of them, too
_WIDTHS = ("split_size", "q_size", "kv_size")


def plan_of_blocks(module: nn.Module, size: int) -> dict[str, Cut]:
    """colwise and rowwise for every module with Linear children for its inputs and one for its output.

    A module is cut only if the parts of `size` ranks then add up to its full output. They may not: an operation in between
    (a softmax, a norm) may need all features, fused rows may have another order than [q; k; v] or [gate; up], or the forward
    may rely on all heads.
    """
    plan: dict[str, Cut] = {}
    tried: dict[object, dict[str, Cut]] = {}
    for name, inner in module.named_modules():
        cuts, out = _guess(inner)
        if cuts:
            path = f"{name}." if name else ""
            plan |= {path + key: cut for key, cut in _tried(inner, cuts, out, size, tried).items()}
    return plan


def _guess(block: nn.Module) -> tuple[dict[str, Cut], str]:
    """The input and output projections of an attention or MLP; none if it looks like neither."""
    linears = {key: child for key, child in block.named_children() if isinstance(child, nn.Linear)}
    into = [key for key in linears if _INTO.match(key)]
    wrapped = [key for key, child in block.named_children() if key not in linears and _is_projection(key, child)]
    if into and wrapped:  # peft's adapters, say: the other projections can't be cut without these
        LOG.warning(
            "[parallelism.tensor] a %s is left whole on every rank, for it has other projections than plain Linears: %s",
            type(block).__name__,
            " and ".join(wrapped),
        )
        return {}, ""
    fused = [key for key in linears if is_fused(key)]
    out = [key for key in linears if _OUT.match(key) or (fused and key == "proj")]
    if into and len(out) == 1 and len({linears[key].out_features for key in into}) <= 2:
        return dict.fromkeys(into, Cut(style="colwise")), out[0]
    if len(fused) == len(out) == 1 and not into:
        return _fused(block, fused[0], out[0]), out[0]
    if not into and not out and isinstance(block, nn.Sequential) and len(linears) == 2:
        first, last = linears
        if linears[first].out_features == linears[last].in_features:
            return {first: Cut(style="colwise")}, last
    return {}, ""


def _is_projection(name: str, child: nn.Module) -> bool:
    return (bool(_INTO.match(name)) or is_fused(name)) and any(True for _ in child.parameters())


def _tried(
    block: nn.Module, cuts: dict[str, Cut], out: str, size: int, tried: dict[object, dict[str, Cut]]
) -> dict[str, Cut]:
    """The cut of the children of `block`; empty if the result would differ. tried: the results for equal blocks."""
    whole = {**cuts, out: Cut(style="rowwise")}
    rows = [part for key, cut in cuts.items() for part in cut.rows(key, linear_of(block, key))]
    if any(number % size for number in (*rows, *heads_of(block).values())):
        return whole  # refused later, with a message
    simple = [(key, value) for key, value in vars(block).items() if isinstance(value, (bool, int, float, str))]
    called = [(key, id(value)) for key, value in vars(block).items() if callable(value)]
    alike = (repr(block), *simple, *called)
    if alike not in tried:
        untried = all(cut.parts is None for cut in cuts.values())
        norms = _norms_between(block, cuts, out)
        fits = norms is not None and adds_up(block, cuts, out, size, share_heads, untried)
        tried[alike] = {**whole, **(norms or {})} if fits else {}
    return tried[alike]


def _norms_between(block: nn.Module, cuts: Mapping[str, Cut], out: str) -> dict[str, Cut] | None:
    """The per-head norms between the projections, which see some heads on a rank. None if there are other parameters."""
    between = parameters_between(block, cuts, out)
    owners = {name.rpartition(".")[0] for name in between}
    if "" in owners or any(block.get_parameter(name).dim() > 1 for name in between):
        LOG.warning(
            "[parallelism.tensor] a %s is left whole on every rank: with %s cut, %s would see a part; a plan can define the cut",
            type(block).__name__,
            " and ".join(cuts),
            " and ".join(between),
        )
        return None
    return {owner: Cut(style="head_norm") for owner in owners}


def is_fused(name: str) -> bool:
    """Whether a module of this name usually holds q, k and v, or gate and up, one after the other in one matrix."""
    last = name.rpartition(".")[2]
    return bool(_FUSED_ATTENTION.match(last) or _FUSED_MLP.match(last))


def _fused(block: nn.Module, into: str, out: str) -> dict[str, Cut]:
    """The cut of an attention or MLP with one fused input projection; empty if it can't be cut.

    q, or gate, has as many rows as the output projection takes inputs; k and v share the rest.
    """
    first, heads = linear_of(block, out).in_features, heads_of(block)
    rest = linear_of(block, into).out_features - first
    mlp = _FUSED_MLP.match(into) is not None
    if (mlp and rest != first) or (not mlp and (rest <= 0 or rest % 2 or not heads)):
        return {}
    return {into: Cut(style="colwise", parts=[first, rest] if mlp else [first, rest // 2, rest // 2])}


def share_all_heads(module: nn.Module, plan: Mapping[str, Cut], size: int) -> None:
    """Set the number of heads of every attention to this rank's share."""
    for name in {name.rpartition(".")[0] for name, cut in plan.items() if cut.style == "colwise"}:
        share_heads(module.get_submodule(name), size)


def share_heads(attention: nn.Module, size: int) -> None:
    """Divide the head counts of an attention by `size`."""
    for attribute, value in heads_of(attention, (*_HEADS, *_WIDTHS)).items():
        setattr(attention, attribute, value // size)


def heads_of(attention: nn.Module, attributes: Sequence[str] = _HEADS) -> dict[str, int]:
    """The head counts of an attention, by attribute name."""
    found = {name: getattr(attention, name, None) for name in attributes}
    return {name: value for name, value in found.items() if isinstance(value, int) and not isinstance(value, bool)}
