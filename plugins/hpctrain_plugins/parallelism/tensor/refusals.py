"""Refuses tensor-parallel plans that would fail or train another model."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.api import ModelSpec, PipelineModel, UsageError
from hpctrain_plugins.parallelism.tensor.blocks import heads_of, is_fused
from hpctrain_plugins.parallelism.tensor.cut import Cut


def refuse_unfit(module: nn.Module, spec: ModelSpec, plan: Mapping[str, Cut], size: int) -> None:
    """Raises UsageError for faults of the plan that show before `module` is cut."""
    for name, cut in plan.items():
        _refuse_uncuttable(module, name, cut)
        _refuse_uneven(module, name, cut, size)
    _refuse_halves(module, spec, plan)


def _refuse_uncuttable(module: nn.Module, name: str, cut: Cut) -> None:
    """Refuse modules that the style can't cut, or would cut wrongly."""
    inner = module.get_submodule(name)
    linear = isinstance(inner, nn.Linear)
    cuts = cut.style in ("colwise", "rowwise", "colwise_rep", "rowwise_rep", "vocabulary")
    within = [f"{name}.{child}" for child, _ in inner.named_children()]
    # an adapter's wrapper of a Linear, as peft has it, has the name only
    named_so = isinstance(inner, (nn.Linear, nn.Embedding)) or type(inner).__name__ in ("Linear", "Embedding")
    if cuts and within and named_so:
        raise UsageError(
            f"[parallelism.tensor] plan: {name} is a {type(inner).__name__} that contains {', '.join(within)}, and {cut.style} "
            "cuts a plain Linear or Embedding; leave it out"
        )
    if cuts and not (linear or (isinstance(inner, nn.Embedding) and cut.parts is None)):
        raise UsageError(
            f"[parallelism.tensor] plan: {name} is a {type(inner).__name__}, and {cut.style} cuts a Linear"
            + (" or an Embedding; leave it out" if cut.parts is None else " into parts; leave them out")
        )
    if linear and cut.style == "colwise" and cut.parts is None and is_fused(name):
        raise UsageError(
            f'[parallelism.tensor] plan: {name} is by its name several matrices in one, and "colwise" would give its first rows '
            'to the first rank; write { style = "colwise", parts = 3 } for [q; k; v], 2 for [gate; up], or the rows of each part '
            "as parts = [64, 16, 16] (1 if the rows of each head lie together)"
        )


def _refuse_uneven(module: nn.Module, name: str, cut: Cut, size: int) -> None:
    inner = module.get_submodule(name)
    dim = {"colwise": 0, "rowwise": 1, "rowwise_rep": 1}.get(cut.style)
    if isinstance(inner, nn.Linear) and dim is not None:
        parts = cut.rows(name, inner) if dim == 0 else [inner.weight.shape[1]]
        if any(part % size for part in parts):
            of_parts = f" in parts of {', '.join(map(str, parts))}" if len(parts) > 1 else ""
            raise UsageError(
                f"[parallelism] tensor = {size}: {name}.weight is {tuple(inner.weight.shape)}, and {cut.style} cuts "
                f"dim {dim}{of_parts}, which {size} ranks do not divide"
            )
    parent = module.get_submodule(name.rpartition(".")[0])
    for attribute, heads in heads_of(parent).items() if cut.style == "colwise" else ():
        if heads % size:
            raise UsageError(
                f"[parallelism] tensor = {size}: {type(parent).__name__}.{attribute} is {heads}, which {size} "
                f"ranks do not divide"
            )


def _refuse_halves(module: nn.Module, spec: ModelSpec, plan: Mapping[str, Cut]) -> None:
    """Refuse colwise without a rowwise Linear after it, and the other way round.

    Modules are assumed to run in the order of the model. Modules with the same parent may run in any order.
    """
    place = {name: at for at, (name, _) in enumerate(module.named_modules()) if name in plan}
    gives = [name for name in place if plan[name].style == "colwise"]
    linear = {name for name in place if isinstance(module.get_submodule(name), nn.Linear)}
    takes = [name for name in place if plan[name].style == "rowwise" and name in linear]
    after = spec.ends(module)[1] if isinstance(spec, PipelineModel) else []
    behind = {inner for end in after for inner in end.modules()}
    last = {name for name in place if module.get_submodule(name) in behind}

    def meet(giver: str, taker: str) -> bool:
        beside = giver.rpartition(".")[0] == taker.rpartition(".")[0]
        return (beside or place[giver] < place[taker]) and (giver not in last or taker in last)

    for name in gives:
        if not any(meet(name, taker) for taker in takes):
            raise UsageError(
                f"[parallelism.tensor] plan: with {name} as colwise each rank has a part of its outputs, and no rowwise "
                'Linear follows that takes parts; write "rowwise" for the Linear that takes them, "colwise_rep" to gather '
                'them, or "vocabulary" for a head whose outputs go to the loss'
            )
    for name in takes:
        if not any(meet(giver, name) for giver in gives):
            raise UsageError(
                f"[parallelism.tensor] plan: {name} as rowwise takes a part of its inputs, and no colwise module comes "
                'before it that gives parts; write "colwise" for the module that feeds it, or leave both out'
            )


def refuse_cut_apart(module: nn.Module, tied: list[list[str]]) -> None:
    """Refuse tied parameters that the plan cuts differently."""
    for first, *others in tied:
        kept = module.get_parameter(first)
        for name in others:
            other = module.get_parameter(name)
            if _placements(kept) != _placements(other):
                raise UsageError(
                    f"[parallelism.tensor] plan: {first} and {name} are one tensor, and the plan cuts them differently "
                    f"({_placements(kept)} and {_placements(other)}); give both modules styles that cut the same dim, "
                    'such as "rowwise" for the embedding and "vocabulary" for the head'
                )


def _placements(parameter: nn.Parameter) -> str:
    return str(parameter.placements) if isinstance(parameter, DTensor) else "not cut"
