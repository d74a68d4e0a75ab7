"""The plugin `tensor`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from hpctrain.api import Field, ModelSpec, Options, Parallelism, UsageError, hookimpl, tie, tied_parameters
from hpctrain_plugins.parallelism.tensor.blocks import heads_of, is_fused, share_all_heads
from hpctrain_plugins.parallelism.tensor.cut import Cut, Entry, gather_shares, linear_of
from hpctrain_plugins.parallelism.tensor.plan import plan_for
from hpctrain_plugins.parallelism.tensor.styles import STYLES


class TensorOptions(Options):
    plan: dict[str, Entry] = Field(
        default={},
        description='styles by module pattern, such as "layers.*.mlp.up" = "colwise", or for a fused [q; k; v] '
        '{ style = "colwise", parts = 3 }; default: the model\'s',
    )
    sequence_parallel: bool = Field(
        default=False, description="cut the activations between the blocks along the sequence, too"
    )


class Tensor(Parallelism):
    """Cuts matrices over the ranks of the axis tp."""

    name = "tensor"
    axis = "tp"
    order = 50
    repeats_loss = True
    Options = TensorOptions
    options: TensorOptions

    @property
    def repeats_activations(self) -> bool:
        return not self.options.sequence_parallel

    def sequence_multiple(self, size: int) -> int:
        return size if self.options.sequence_parallel else 1

    def refuse(self, spec: ModelSpec, size: int) -> str | None:
        heads = spec.attention_heads
        if heads is not None and heads % size:
            return (
                f"the model has {heads} attention heads, which {size} ranks do not divide; choose a divisor of {heads}"
            )
        return None

    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> nn.Module:
        plan = plan_for(module, spec, self.options.plan, mesh.size())
        for name, cut in plan.items():
            _refuse_unfit(module, name, cut)
            _refuse_uneven(module, name, cut, mesh.size())
        if not spec.tensor_plan():
            share_all_heads(module, plan, mesh.size())
        tied = tied_parameters(module)
        for name, cut in plan.items():
            inner = module.get_submodule(name)
            if cut.parts is not None:
                linear = linear_of(module, name)
                gather_shares(linear, cut.rows(name, linear), mesh.size())
            made = STYLES[cut.style](inner, self.options.sequence_parallel)
            if made is not None:
                # every rank has the same values, or none yet: nothing to send
                parallelize_module(module, mesh, {name: made}, src_data_rank=None)
        _refuse_cut_apart(module, tied)
        tie(module, tied)
        return module

    def context(self) -> AbstractContextManager[object]:
        return loss_parallel()


def _refuse_unfit(module: nn.Module, name: str, cut: Cut) -> None:
    """What the style can't cut, or would cut wrongly."""
    inner = module.get_submodule(name)
    linear = isinstance(inner, nn.Linear)
    cuts = cut.style in ("colwise", "rowwise", "colwise_rep", "vocabulary")
    if cuts and not (linear or (isinstance(inner, nn.Embedding) and cut.parts is None)):
        raise UsageError(
            f"[parallelism.tensor] plan: {name} is a {type(inner).__name__}, and {cut.style} cuts a Linear"
            + (" or an Embedding; leave it out" if cut.parts is None else " into parts; leave them out"),
            everywhere=True,
        )
    if linear and cut.style == "colwise" and cut.parts is None and is_fused(name):
        raise UsageError(
            f'[parallelism.tensor] plan: {name} is several matrices in one by its name, and "colwise" would give its first rows '
            'to the first rank; write { style = "colwise", parts = 3 } for [q; k; v], 2 for [gate; up], or the rows of each part '
            "as parts = [64, 16, 16] (1 if the rows of each head lie together)",
            everywhere=True,
        )


def _refuse_uneven(module: nn.Module, name: str, cut: Cut, size: int) -> None:
    inner = module.get_submodule(name)
    dim = {"colwise": 0, "rowwise": 1}.get(cut.style)
    if isinstance(inner, nn.Linear) and dim is not None:
        parts = cut.rows(name, inner) if dim == 0 else [inner.weight.shape[1]]
        if any(part % size for part in parts):
            of_parts = f" in parts of {', '.join(map(str, parts))}" if len(parts) > 1 else ""
            raise UsageError(
                f"[parallelism] tensor = {size}: {name}.weight is {tuple(inner.weight.shape)}, and {cut.style} cuts "
                f"dim {dim}{of_parts}, which {size} ranks do not divide",
                everywhere=True,
            )
    parent = module.get_submodule(name.rpartition(".")[0])
    for attribute, heads in heads_of(parent).items() if cut.style == "colwise" else ():
        if heads % size:
            raise UsageError(
                f"[parallelism] tensor = {size}: {type(parent).__name__}.{attribute} is {heads}, which {size} "
                f"ranks do not divide",
                everywhere=True,
            )


def _refuse_cut_apart(module: nn.Module, tied: list[list[str]]) -> None:
    """Tied parameters that are no longer one."""
    for first, *others in tied:
        kept = module.get_parameter(first)
        for name in others:
            other = module.get_parameter(name)
            if _placements(kept) != _placements(other):
                raise UsageError(
                    f"[parallelism.tensor] plan: {first} and {name} are one tensor, and the plan cuts them differently "
                    f"({_placements(kept)} and {_placements(other)}); give both modules styles that cut the same dim, "
                    'such as "rowwise" for the embedding and "vocabulary" for the head',
                    everywhere=True,
                )


def _placements(parameter: nn.Parameter) -> str:
    return str(parameter.placements) if isinstance(parameter, DTensor) else "not cut"


@hookimpl
def hpctrain_parallelism() -> list[type[Parallelism]]:
    return [Tensor]
