"""The plugin `tensor`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from hpctrain.api import (
    AppliedAxis,
    AttentionModel,
    AxisTraits,
    Field,
    ModelSpec,
    Options,
    Parallelism,
    PipelineModel,
    Plan,
    Problem,
    TensorParallelModel,
    UsageError,
    hookimpl,
    tie,
    tied_parameters,
)
from hpctrain.toolkit.attention import narrowed
from hpctrain_plugins.parallelism.tensor.blocks import share_all_heads
from hpctrain_plugins.parallelism.tensor.cut import StyleOrCut, gather_shares, linear_of
from hpctrain_plugins.parallelism.tensor.hugging_face import hugging_face_plan
from hpctrain_plugins.parallelism.tensor.plan import plan_for
from hpctrain_plugins.parallelism.tensor.refusals import refuse_cut_apart, refuse_unfit
from hpctrain_plugins.parallelism.tensor.styles import NARROWED, STYLES
from hpctrain_plugins.parallelism.tensor.whole import WholeGradients

LOG = logging.getLogger("hpctrain")


class TensorOptions(Options):
    plan: dict[str, StyleOrCut] = Field(
        default={},
        description='styles by module pattern, such as "layers.*.mlp.up" = "colwise", or for a fused [q; k; v] '
        '{ style = "colwise", parts = 3 }; default: the model\'s',
    )
    sequence_parallel: bool = Field(
        default=False, description="also cut the activations between the blocks along the sequence"
    )


class TensorParallel(Parallelism):
    """Cuts matrices over the ranks of the axis tp."""

    name = "tensor"
    Options = TensorOptions
    options: TensorOptions

    @property
    def traits(self) -> AxisTraits:
        return AxisTraits(
            "tp",
            50,
            "the same samples",
            repeats_activations=not self.options.sequence_parallel,
            shares_heads=not self.options.plan,  # a plan of the job may leave attention whole
            one_shape="compiled",  # torch's compiler recurses for ever on DTensors with dynamic sizes
        )

    def sequence_multiple(self, size: int, spec: ModelSpec) -> int:
        return size if self.options.sequence_parallel else 1

    def problems(self, plan: Plan) -> list[Problem]:
        size, spec, outline = plan.sizes[self.name], plan.model, plan.outline
        sequence = self.options.sequence_parallel
        brings = isinstance(spec, TensorParallelModel) or self.options.plan
        if sequence and plan.sizes.get("pipeline", 1) > 1 and isinstance(spec, PipelineModel) and not brings:
            why = "later pipeline stages of this model would not know which tokens they have; use one of the two"
            return [Problem(f"sequence_parallel: {why}")]
        heads = spec.attention_heads if isinstance(spec, AttentionModel) else None
        if heads is not None and heads % size:
            why = (
                f"the model has {heads} attention heads, which {size} ranks do not divide; choose a divisor of {heads}"
            )
            return [Problem(why)]
        if outline is not None:
            refuse_unfit(outline, spec, plan_for(outline, spec, self.options.plan, size, sequence), size)
        return []

    def apply(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh) -> AppliedTensorParallel:
        plan = plan_for(module, spec, self.options.plan, mesh.size(), self.options.sequence_parallel)
        refuse_unfit(module, spec, plan, mesh.size())
        if not isinstance(spec, TensorParallelModel):
            share_all_heads(module, plan, mesh.size())
        tied, trained = tied_parameters(module), {name for name, p in module.named_parameters() if p.requires_grad}
        brings = isinstance(spec, TensorParallelModel) or hugging_face_plan(module)
        done: set[nn.Module] = set()
        for name, cut in plan.items():
            inner = module.get_submodule(name)
            if inner in done:  # the module is in several places
                continue
            done.add(inner)
            if cut.parts is not None:
                linear = linear_of(module, name)
                gather_shares(linear, cut.rows(name, linear), mesh.size())
            made = STYLES[cut.style](inner, self.options.sequence_parallel)
            if made is not None:
                if cut.style in NARROWED:
                    inner.register_forward_pre_hook(lambda _, inputs: tuple(narrowed(*inputs)))
                # every rank has the same values, or none yet: no broadcast needed
                parallelize_module(module, mesh, {name: made}, src_data_rank=None)
                if isinstance(inner, nn.Embedding) or not brings:
                    inner.register_forward_hook(_arrived)
        refuse_cut_apart(module, tied)
        tie(module, tied)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trained)  # some of torch's styles create trainable parameters
        return AppliedTensorParallel(module, mesh, self.options)


def _arrived(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
    """The output as a tensor of its own: a compiled block that takes one which is still on its way has no backward, and a model
    can't change a view of one in place."""
    return output.clone()


class AppliedTensorParallel(AppliedAxis):
    """Watches the first micro batch, in which a wrong plan fails."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, options: TensorOptions) -> None:
        super().__init__(module)
        self._size, self._options, self._has_run = mesh.size(), options, False
        self._whole = WholeGradients(module, mesh.get_group())

    @contextmanager
    def context(self) -> Iterator[None]:
        with loss_parallel():
            try:
                yield
            except RuntimeError as error:
                # collectives and memory raise other types; an operator that DTensor lacks raises NotImplementedError
                if self._has_run or type(error) not in (RuntimeError, NotImplementedError):
                    raise
                LOG.info("the first micro batch failed", exc_info=True)
                given = ", ".join(f"{pattern} as {cut.style}" for pattern, cut in self._options.plan.items())
                raise UsageError(
                    f"[parallelism.tensor] plan: the first micro batch failed with the model cut over {self._size} ranks "
                    f"({given or 'no plan given'}, sequence_parallel = {str(self._options.sequence_parallel).lower()}): "
                    f"{error}; does the plan name every module with a partial input or output? The traceback is in this rank's log"
                ) from error
        self._has_run = True
        if torch.is_grad_enabled() and not self._whole.compared:
            self._whole.compare()


@hookimpl
def hpctrain_parallelism() -> list[type[Parallelism]]:
    return [TensorParallel]
