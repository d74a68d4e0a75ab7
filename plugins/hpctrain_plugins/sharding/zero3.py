"""ZeRO stage 3: parameters are sharded, too, and gathered unit by unit in forward and backward.

It uses torch's fully_shard, but not its divisions, its sum over replicas and its accumulation over micro batches: the loop
divides the loss, and the other two would wait for communication.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from pydantic import field_validator, model_validator
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hpctrain.api import (
    BucketSum,
    Field,
    GradientBucket,
    GradientSums,
    ModelSpec,
    Options,
    Piece,
    Plan,
    Problem,
    ShardedModel,
    Sharding,
    TrainingError,
    UsageError,
    communicate_by_dtype,
    hookimpl,
    is_accelerator,
    pieces_of,
)
from hpctrain.toolkit.buckets import trained
from hpctrain.toolkit.offload import HostGradients, host_copy, is_needed, warn_if_useless
from hpctrain_plugins.sharding import advice
from hpctrain_plugins.sharding.communication import AsynchronousAllGather, HostBuffers, Pending, SummingReduceScatter
from hpctrain_plugins.sharding.whole_gradients import WholeGradients
from hpctrain_plugins.sharding.wrapping import refuse_unseen, units_of, unseen

_MIN_PARAMETERS = 100_000_000
_KEEPING_MEANS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Zero3Options(Options):
    wrap: str = Field(
        default="block",
        description='the unit that is gathered at once: "block", "size" (see min_parameters) or "class:NAME" of a module',
    )
    min_parameters: int | None = Field(
        default=None, ge=1, description='the fewest parameters of a unit with wrap = "size" (default: 100,000,000)'
    )
    reshard_after_forward: bool = Field(
        default=True, description="free a unit's parameters after forward and gather them again in backward"
    )
    gather_dtype: Literal["products", "parameters"] = Field(
        default="products",
        description='the dtype in which accelerators gather units: that of products, or with "parameters" that of parameters',
    )
    prefetch: int = Field(default=1, ge=0, description="units that are gathered ahead of the running unit")
    offload_optimizer: bool = Field(default=False, description="keep optimizer state and its parameters in host memory")
    offload_parameters: bool = Field(
        default=False, description="keep parameters, gradients and optimizer state in host memory"
    )
    pin_memory: bool = Field(default=True, description="pin that host memory, for faster copies")

    @field_validator("wrap")
    @classmethod
    def _known(cls, wrap: str) -> str:
        if not re.fullmatch(r"block|size|class:\w+", wrap):
            raise ValueError('expected wrap = "block", "size" or "class:NAME"')
        return wrap

    @model_validator(mode="after")
    def _only_size_has_a_minimum(self) -> Zero3Options:
        if self.min_parameters is not None and self.wrap != "size":
            raise ValueError(f'min_parameters goes with wrap = "size"; with wrap = "{self.wrap}" it has no effect')
        return self


@dataclass
class Held:
    """Rows of a parameter in this rank's shard."""

    parameter: DTensor
    begin: int
    """The first row in the shard."""
    local: Tensor
    """The values in the shard."""
    piece: Piece
    """The piece with these values, or with a copy in host memory."""

    def gradient(self) -> Tensor:
        """The gradient of the last backward; zeros if there was none."""
        whole = self.parameter.grad
        if not isinstance(whole, DTensor):
            return torch.zeros_like(self.piece.tensor)
        return whole.to_local()[self.begin : self.begin + len(self.local)]


class Zero3(Sharding):
    """ZeRO stage 3: everything is sharded."""

    name = "zero-3"
    divides = frozenset({"parameters", "gradients", "optimizer state"})
    memory_advice = advice.memory_advice
    Options = Zero3Options
    options: Zero3Options

    def axes(self, ranks: int, replicate: int) -> dict[str, int]:
        return {"dp_replicate": replicate, "dp_shard": ranks // replicate}

    def problems(self, plan: Plan) -> list[Problem]:
        if any(traits.interleaves for traits in plan.traits):
            why = (
                "a pipeline interleaves the forwards and backwards of micro batches, and stage 3 would gather every "
                "parameter for each; use stage = 2 or less with pipeline"
            )
            return [Problem(why)]
        if plan.outline is not None:
            _refuse_scalars(plan.outline, plan.model)
            if self.options.wrap.startswith("class:"):
                units_of(plan.outline, plan.model, self.options.wrap, self.options.min_parameters or _MIN_PARAMETERS)
        return []

    def home(self, device: torch.device) -> torch.device:
        return torch.device("cpu") if is_needed(self.options.offload_parameters, device) else device

    def shard(self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh, sums: GradientSums) -> Zero3Model:
        return Zero3Model(module, spec, mesh, sums, self.options)


def _rounded(unit: nn.Module, device: torch.device) -> MixedPrecisionPolicy:
    """Gathers a unit in autocast's dtype, where its modules take that; its gradients are summed in its own."""
    own = {parameter.dtype for parameter in unit.parameters() if parameter.requires_grad}
    keeps_means = any(isinstance(one, _KEEPING_MEANS) for one in unit.modules())
    if keeps_means or len(own) != 1 or not (dtype := own.pop()).is_floating_point:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.get_autocast_dtype(device.type), reduce_dtype=dtype, cast_forward_inputs=False)


class Zero3Model(ShardedModel):
    """torch's fully_shard, unit by unit."""

    def __init__(
        self, module: nn.Module, spec: ModelSpec, mesh: DeviceMesh, sums: GradientSums, options: Zero3Options
    ) -> None:
        super().__init__(module)
        self.options = options
        _refuse_scalars(module, spec)
        self._replicate, self._sums = mesh["dp_replicate"].get_group(), sums
        self._over_replicas: dict[torch.dtype, BucketSum] = {}
        device = torch.device(mesh.device_type)
        offloads_parameters = is_needed(options.offload_parameters, device)
        self._offloads = is_needed(options.offload_optimizer, device) and not offloads_parameters
        warn_if_useless(options.offload_parameters or options.offload_optimizer, device)
        policy = CPUOffloadPolicy(options.pin_memory) if offloads_parameters else OffloadPolicy()
        units = units_of(module, spec, options.wrap, options.min_parameters or _MIN_PARAMETERS)
        autocasts = is_accelerator(device) and torch.is_autocast_enabled(device.type)
        rounds = autocasts and options.gather_dtype == "products"
        self._rounds = False
        empty = {parameter for parameter in module.parameters() if not parameter.numel()}
        frozen = not any(parameter.requires_grad for parameter in module.parameters())  # no backward would free it
        names = {id(one): name for name, one in module.named_modules()}
        for unit in reversed(units):  # inner ones first
            unit.register_forward_pre_hook(partial(self._note, names[id(unit)]))
            wire = _rounded(unit, device) if rounds else MixedPrecisionPolicy()
            self._rounds |= wire.param_dtype is not None
            unit.register_forward_hook(partial(refuse_unseen, type(unit).__name__))
            fully_shard(
                unit,
                mesh=mesh["dp_shard"],
                reshard_after_forward=options.reshard_after_forward or frozen,
                mp_policy=wire,
                offload_policy=policy,
                ignored_params=empty,
            )
        # Parameters outside of all units are needed again when backward begins. They stay wide: an embedding in 16 bits would
        # make the residual stream 16 bits, too.
        fully_shard(
            module, mesh=mesh["dp_shard"], reshard_after_forward=frozen, offload_policy=policy, ignored_params=empty
        )
        self._has_forwarded, self._caches = False, True
        module.register_forward_pre_hook(self._forwards)
        module.register_forward_hook(self._forwarded, always_call=True)
        self._units = [cast(FSDPModule, one) for one in (module, *units)]
        self._set_up(self._units, mesh.device_type)
        self._whole = WholeGradients(self._units, sums, mesh["dp_shard"].get_group(), options.reshard_after_forward)

    def _note(self, name: str, unit: nn.Module, *_: Any) -> None:
        if unit.training:
            self.ran.append(name)

    def _forwards(self, module: nn.Module, inputs: Any) -> None:
        """A forward begins, of a training or an evaluation."""
        self._has_forwarded, self._caches = True, torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a kept cast of a unit's weight would outlive the unit, which is freed

    def _forwarded(self, module: nn.Module, *_: Any) -> None:
        self._note("", module)
        torch.set_autocast_cache_enabled(self._caches)

    def _set_up(self, units: list[FSDPModule], device_type: str) -> None:
        """Set sums instead of means, asynchronous communication, and prefetching."""
        pending: Pending = deque()
        buffers = HostBuffers()
        gather = AsynchronousAllGather(buffers) if device_type == "cpu" else None
        self._reduce_scatters: list[SummingReduceScatter] = []

        def sums() -> SummingReduceScatter:
            self._reduce_scatters.append(SummingReduceScatter(self._sums, pending, buffers))
            return self._reduce_scatters[-1]

        ahead = self.options.prefetch
        for number, unit in enumerate(units):
            communicate_by_dtype(cast(nn.Module, unit), gather, sums)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_reduce_scatter_unused_params(True, recurse=False)
            following = units[number + 1 : number + 1 + ahead]
            if following:
                unit.set_modules_to_forward_prefetch(following)
            before = units[max(1, number - ahead) : number]
            if before and ahead > 1:  # fully_shard gathers one unit ahead anyway
                unit.set_modules_to_backward_prefetch(before[::-1])

    def materialized(self) -> None:
        self._held: list[Held] = []
        self._host_gradients = HostGradients(self.options.pin_memory)
        module = self.module
        for name, parameter in trained(module):
            assert isinstance(parameter, DTensor)
            begin = 0
            for piece in pieces_of(module, name, parameter):
                local = piece.tensor
                if not local.numel():
                    continue  # fewer rows than ranks
                values = host_copy(local, self.options.pin_memory) if self._offloads else local
                self._held.append(Held(parameter, begin, local, replace(piece, tensor=nn.Parameter(values))))
                begin += len(local)
        self._parameters = [parameter for _, parameter in trained(module)]
        self._fresh = True

    def begin(self, last: bool, interleaved: bool = False) -> None:
        if self._fresh:
            if self._whole.kept:  # no backward has followed
                self._whole.take()
            for held in self._held:
                held.piece.tensor.grad = None
        else:
            self._collect()
        self._fresh = False

    @torch.no_grad()
    def _collect(self) -> None:
        """Take over the gradients of the last backward, so that fully_shard finds none to add to."""
        for one in self._reduce_scatters:
            one.finish()
        if self._whole.kept:
            rows = self._whole.take()
            self._add([rows[held.piece.name][held.begin : held.begin + len(held.local)] for held in self._held])
            return
        if all(made.grad is None for made in self._parameters):  # not even zeros for unused parameters
            raise unseen("backward reached no output of the model")
        gradients = [held.gradient() for held in self._held]
        if self._offloads:
            gradients = self._host_gradients.bring(gradients, all(one.piece.tensor.grad is None for one in self._held))
        self._add(gradients)
        for made in self._parameters:
            made.grad = None

    def _add(self, gradients: Sequence[Tensor]) -> None:
        """Add gradients, one for each of what this rank holds, to those of the step."""
        for held, gradient in zip(self._held, gradients, strict=True):
            if held.piece.tensor.grad is None:
                held.piece.tensor.grad = gradient
            else:
                held.piece.tensor.grad += gradient

    def restart(self, last: bool) -> None:
        for held in self._held:  # `begin` has collected what there was
            held.piece.tensor.grad = None

    def keep_whole(self) -> None:
        options = self.options
        if self._offloads or options.offload_parameters or self._rounds:
            raise TrainingError(
                "[sharding] stage = 3: the program differentiates through the model outside of its backward, which goes with "
                'neither offloading nor gathering in 16 bits; set gather_dtype = "parameters", without offloading, or use stage = 2'
            )
        self._whole.keep()

    @torch.no_grad()
    def synchronize(self) -> None:
        self._collect()
        self._fresh = True
        if self._replicate.size() > 1:
            self._sum_over_replicas()

    def _sum_over_replicas(self) -> None:
        """Hybrid sharding: ranks with the same place in dp_shard hold the same pieces."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for held in self._held:
            assert held.piece.tensor.grad is not None
            by_dtype.setdefault(held.piece.tensor.dtype, []).append(held.piece.tensor.grad)
        for gradients in by_dtype.values():
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            if flat.dtype not in self._over_replicas:
                content = GradientBucket(None, len(flat), flat.dtype, flat.device)
                self._over_replicas[flat.dtype] = self._sums.bucket(content, "dp_replicate")
            self._over_replicas[flat.dtype].all_reduce(flat)()
            for gradient, summed in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))

    def watch(self, used: Callable[[str, bool], None]) -> None:
        cut = {id(parameter): name for name, parameter in trained(self.module)}
        for name, parameter in trained(self.module):
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: used(name, False))
        units = [cast(nn.Module, unit) for unit in self._units]
        for unit in units:
            parts = [part for _, part in unit.named_modules(memo={one for one in units if one is not unit})]
            places = [(part, key, id(one)) for part in parts for key, one in part.named_parameters(recurse=False)]
            held = [(part, key, cut[one]) for part, key, one in places if one in cut]
            unit.register_forward_pre_hook(partial(_watch, used, held, set[int]()))

    def rest(self) -> None:
        if not self._whole.kept:
            for unit in self._units:
                unit.reshard()

    @torch.no_grad()
    def adopt(self) -> None:
        for held in self._held if self._offloads else ():
            held.piece.tensor.copy_(held.local)

    @torch.no_grad()
    def refresh(self) -> None:
        if self._offloads:
            for held in self._held:
                held.local.copy_(held.piece.tensor, non_blocking=True)
        if self._has_forwarded:  # before, there is no such state
            # a forward without a backward leaves units gathered, or half gathered, with the values of before
            cast(FSDPModule, self.module).reset_iter_state()
        self._has_forwarded = False

    def pieces(self) -> list[Piece]:
        return [held.piece for held in self._held]


def _watch(
    used: Callable[[str, bool], None], held: Sequence[tuple[nn.Module, str, str]], watched: set[int], *_: Any
) -> None:
    """A forward hook of a unit: watches the parameters that it has gathered. held: by module and attribute, with their names."""
    for part, key, name in held:
        parameter = getattr(part, key)
        if parameter.requires_grad and id(parameter) not in watched:  # it lives as long as the unit
            watched.add(id(parameter))
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: used(name, True))


def _refuse_scalars(module: nn.Module, spec: ModelSpec) -> None:
    scalars = [name for name, parameter in module.named_parameters() if parameter.dim() == 0]
    if scalars:
        raise UsageError(
            f"[sharding] stage = 3: {', '.join(scalars)} of the model {spec.name!r} is a scalar and has no rows to shard; "
            "give it the shape (1,), or use stage = 2"
        )


@hookimpl
def hpctrain_sharding() -> list[type[Sharding]]:
    return [Zero3]
