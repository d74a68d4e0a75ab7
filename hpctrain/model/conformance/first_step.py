"""The first step of a run as a trial of its plugins: gradients are sums over the ranks, and the module follows the pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from hpctrain.contracts.life_cycle import LiveModel
from hpctrain.contracts.parallelism import Parallelism
from hpctrain.contracts.plugin import broken
from hpctrain.contracts.sharding import Sharding
from hpctrain.model.mesh import Meshes
from hpctrain.ranks.json_collectives import gather_values, sum_of

_TOLERANCE = 0.05
"""Relative to the gradient's norm: bfloat16 sums in another order are within a hundredth."""
_ALIKE = 1e-3
"""Relative; ranks with the same samples round in different ways."""
_WATCHED = 8
_VISIBLE = 1e-4
"""Gradients below this share of the full one may be rounding errors, as those of the keys' biases in attention."""


class _Model(LiveModel, Protocol):
    meshes: Meshes


class FirstStep:
    """Watches the smallest trained parameters through one step."""

    def __init__(
        self,
        model: _Model,
        sharding: Sharding,
        axes: Sequence[Parallelism],
        counts: Sequence[int],
        sums_are_exact: bool,
    ) -> None:
        """axes: outermost first. counts: those of a micro batch, before any axis and behind each. sums_are_exact: whether
        gradients travel whole."""
        self._model, self._sharding, self._axes, self._counts = model, sharding, axes, counts
        sized = sorted((prod(shape), name) for name, shape in model.shapes.items())
        self._names = [name for size, name in sized if size][:_WATCHED]
        found = dict(model.module.named_parameters())
        here = [found[name] for name in self._names if name in found and not isinstance(found[name], DTensor)]
        # other axes have hooks of their own that bring gradients into their form
        watches = sums_are_exact and not sharding.ranks_diverge and all(one.traits.cuts_samples for one in axes)
        self._parameters = here if watches and len(here) == len(self._names) else []
        self._gradients = [torch.zeros_like(_widened(one)) for one in self._parameters]
        self._calls = 0
        # what is accumulated, in contrast to what autograd.grad computes; a node lives as long as somebody holds it
        self._nodes = [get_gradient_edge(one).node for one in self._parameters]
        self._handles = [node.register_prehook(partial(self._add, i)) for i, node in enumerate(self._nodes)]

    def _add(self, place: int, gradients: tuple[Tensor, ...]) -> None:
        self._gradients[place] += _widened(gradients[0])
        self._calls += 1

    def forwarded(self, loss: float) -> None:
        """Raises ContractError if the ranks of an axis have other samples, or parts of samples, than its traits say. Collective.

        loss: of this rank's micro batches. Their backwards are over, and nothing is watched any more.
        """
        for handle in self._handles:
            handle.remove()
        for place, plugin in enumerate(self._axes):
            group, traits = self._model.meshes.axis(plugin.traits.axis).get_group(), plugin.traits
            seen: list[tuple[float, int, int]] = gather_values((loss, *self._counts[place : place + 2]), group)
            losses, before, parts = ([one[i] for one in seen] for i in range(3))
            if traits.cuts_samples and sum(parts) != before[0]:
                found = f"cut a micro batch that counts {before[0]} into parts that count {parts}"
                raise broken(plugin, found, "parts that count as much together")
            if traits.ranks_have == "the same samples" and max(losses) - min(losses) > _ALIKE * max(map(abs, losses)):
                found = f"says that ranks of {traits.axis} have the same samples, but their losses are {losses}"
                raise broken(plugin, found, "one loss on all of them, or another ranks_have")

    def summed(self, norm: float, scale: float) -> None:
        """Raises ContractError if gradients are not the sums of what backward made on the data-parallel ranks. Collective.

        norm: of the full gradient, without the loss's `scale`.
        """
        figures = torch.tensor([float(self._calls > 0), float(bool(self._parameters))])
        dist.all_reduce(figures)
        if figures[0] == 0 or figures[1] < dist.get_world_size():
            return  # split backwards show no gradients
        wanted = torch.cat([one.reshape(-1) for one in self._gradients]) / scale
        dist.all_reduce(wanted, group=self._model.meshes.batch_group())
        found = torch.cat([_widened(self._model.gradient(name)).reshape(-1) for name in self._names])
        size = float(wanted.norm())
        if size > _VISIBLE * norm and float((found - wanted).norm()) > _TOLERANCE * size:
            told = f"left gradients of {self._names[0]} and others whose norm is {float(found.norm()):.4g}"
            raise broken(self._sharding, told, f"{size:.4g}, the norm of the sum over the data-parallel ranks")

    def updated(self) -> None:
        """Raises ContractError if the module's parameter is not what the pieces say, after a step and its refresh. Collective."""
        if self._sharding.ranks_diverge:
            return
        here = dict(self._model.module.named_parameters())
        values = {name: self._model.value(name) for name in self._names}
        late = sum_of(sum(not _is(here.get(name), value) for name, value in values.items()))
        if late:
            found = f"left {late} parameters in the module with other values than their pieces have after a step and `refresh`"
            raise broken(self._sharding, found, "the values of the pieces")


def _is(here: Tensor | None, whole: Tensor) -> bool:
    """Whether a rank's parameter has the values `whole`; also where it has a part of them, or nothing."""
    if here is None or isinstance(here, DTensor) or here.shape != whole.shape:
        return True
    return bool(torch.equal(here.detach().to(whole.device).nan_to_num(), whole.to(here.dtype).nan_to_num()))


def _widened(tensor: Tensor) -> Tensor:
    """A copy on the CPU in double precision."""
    return tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
