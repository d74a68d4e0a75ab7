"""The plugin `tensor`."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from hpctrain.api import Field, ModelSpec, Options, Parallelism, UsageError, hookimpl
from hpctrain_plugins.parallelism.tensor.blocks import HEADS, share_heads
from hpctrain_plugins.parallelism.tensor.plan import plan_for
from hpctrain_plugins.parallelism.tensor.styles import STYLES


class TensorOptions(Options):
    plan: dict[str, str] = Field(
        default={}, description='styles by module pattern, such as "layers.*.mlp.up" = "colwise"; default: the model\'s'
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

    def refuse(self, spec: ModelSpec, size: int) -> str | None:
        heads = spec.attention_heads
        if heads is not None and heads % size:
            return (
                f"the model has {heads} attention heads, which {size} ranks do not divide; choose a divisor of {heads}"
            )
        return None

    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> nn.Module:
        plan = plan_for(module, spec, self.options.plan)
        self._refuse_uneven(module, plan, mesh.size())
        if not spec.tensor_plan():
            share_heads(module, plan, mesh.size())
        tied = _tied(module)
        for name, style in plan.items():
            made = STYLES[style](module.get_submodule(name), self.options.sequence_parallel)
            if made is not None:
                # every rank has the same values, or none yet: nothing to send
                parallelize_module(module, mesh, {name: made}, src_data_rank=None)
        _tie(module, tied)
        return module

    def context(self) -> AbstractContextManager[object]:
        return loss_parallel()

    @staticmethod
    def _refuse_uneven(module: nn.Module, plan: dict[str, str], size: int) -> None:
        for name, style in plan.items():
            inner = module.get_submodule(name)
            cut = {"colwise": 0, "rowwise": 1}.get(style)
            if isinstance(inner, nn.Linear) and cut is not None and inner.weight.shape[cut] % size:
                raise UsageError(
                    f"[parallelism] tensor = {size}: {name}.weight is {tuple(inner.weight.shape)}, and {style} cuts "
                    f"dim {cut}, which {size} ranks do not divide"
                )
            parent = module.get_submodule(name.rpartition(".")[0])
            for attribute in HEADS if style == "colwise" else ():
                heads = getattr(parent, attribute, None)
                if isinstance(heads, int) and not isinstance(heads, bool) and heads % size:
                    raise UsageError(
                        f"[parallelism] tensor = {size}: {type(parent).__name__}.{attribute} is {heads}, which {size} "
                        f"ranks do not divide"
                    )


def _tied(module: nn.Module) -> list[list[str]]:
    """The names of parameters that are one tensor, where there are several."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _tie(module: nn.Module, tied: list[list[str]]) -> None:
    """Make tied parameters one again after each has been replaced. Raises UsageError where they are cut differently."""
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
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, kept)


def _placements(parameter: nn.Parameter) -> str:
    return str(parameter.placements) if isinstance(parameter, DTensor) else "not cut"


@hookimpl
def hpctrain_parallelism() -> list[type[Parallelism]]:
    return [Tensor]
