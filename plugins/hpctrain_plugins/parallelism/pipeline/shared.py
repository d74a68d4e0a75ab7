"""Parameters that several ranks of a pipeline need, such as an embedding that is also the head.

One rank, the owner, has the parameter in its module. Only there it is sharded, updated and saved. The other ranks hold a copy
that is not a parameter of their module. The copy gets the owner's values before each step, so that both are equal to the bit,
and its gradient is added to the owner's after the step. Updated on both ends, they would come to differ by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass
class SharedParameter:
    """A parameter of several stages. `name` is its name in the single-process model."""

    name: str
    trained: bool
    owner: int
    others: list[int]
    copy: nn.Parameter
    """The copy, on ranks that do not own the parameter; on the meta device until `place`."""
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    """The places of the copy on this rank: modules and their attributes."""


def find_shared(module: nn.Module, dropped: Sequence[Sequence[nn.Module]]) -> list[SharedParameter]:
    """The parameters of the full `module` that several ranks need. dropped[rank]: modules that the rank will not have."""
    kept = [[inner for _, inner in module.named_modules(memo=set(gone))] for gone in dropped]
    held = [{id(p) for inner in modules for p in inner.parameters(recurse=False)} for modules in kept]
    shared = []
    for name, parameter in module.named_parameters():
        ranks = [rank for rank, found in enumerate(held) if id(parameter) in found]
        if len(ranks) < 2:
            continue
        home = module.get_submodule(name.rpartition(".")[0])
        # the owner has the place that gives the parameter its name, so names stay those of the full model
        owner = next(rank for rank in ranks if any(home is inner for inner in kept[rank]))
        others = [rank for rank in ranks if rank != owner]
        shared.append(SharedParameter(name, parameter.requires_grad, owner, others, parameter))
    return shared


class SharedParameters:
    """The shared parameters of this rank."""

    def __init__(self, module: nn.Module, shared: list[SharedParameter], group: dist.ProcessGroup) -> None:
        """module: this rank's, with the modules of other stages dropped. Copies are removed from it until `place`."""
        self._module, self._shared, self._group, self._fresh = module, shared, group, True
        for one in shared:
            if group.rank() not in one.others:
                continue
            for inner in module.modules():
                own = [
                    name for name, p in inner.named_parameters(recurse=False, remove_duplicate=False) if p is one.copy
                ]
                for name in own:
                    delattr(inner, name)
                    one.places.append((inner, name))

    def place(self, device: torch.device) -> None:
        """Put the copies in their places, without values."""
        for one in self._shared:
            if one.places:
                (one.copy,) = nn.ParameterList([one.copy]).to_empty(device=device)
            for inner, name in one.places:
                inner.__dict__[name] = one.copy  # setattr would make it a parameter of the module

    def copies_of(self, stage: nn.Module) -> list[nn.Parameter]:
        """The trained copies that `stage` uses."""
        inside = set(stage.modules())
        return [one.copy for one in self._shared if one.trained and any(inner in inside for inner, _ in one.places)]

    @torch.no_grad()
    def spread(self) -> list[dist.Work]:
        """Send the owner's values to the copies. The owner must wait for the returned works before it changes its values."""
        works: list[dist.Work | None] = []
        for one in self._shared:
            if not (one.trained or self._fresh):
                continue
            if self._group.rank() == one.owner:
                values = _local(self._module.get_parameter(one.name)).contiguous()
                works += [dist.isend(values, group_dst=rank, group=self._group) for rank in one.others]
            elif self._group.rank() in one.others:
                dist.recv(_local(one.copy), group_src=one.owner, group=self._group)
        self._fresh = False
        return [work for work in works if work is not None]

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Add the copies' gradients to the owner's."""
        for one in self._shared:
            if not one.trained:
                continue
            if self._group.rank() == one.owner:
                gradient = _gradient(self._module.get_parameter(one.name))
                received = torch.empty_like(gradient)
                for rank in one.others:
                    dist.recv(received, group_src=rank, group=self._group)
                    gradient += received
            elif self._group.rank() in one.others:
                dist.send(_gradient(one.copy).contiguous(), group_dst=one.owner, group=self._group)
                one.copy.grad = None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gradient(parameter: nn.Parameter) -> Tensor:
    """This rank's part of the gradient, not a copy; zeros if the parameter was not used."""
    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    parameter.grad = gradient
    return _local(gradient)
