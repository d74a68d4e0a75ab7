"""Reduces the gradients of an optimizer's parameters while the backward pass still runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from hpctrain_horovod.common.process_sets import ProcessSet
from hpctrain_horovod.engine.errors import HorovodInternalError
from hpctrain_horovod.torch.compression import Compressor
from hpctrain_horovod.torch.mpi_ops import (
    Average,
    allreduce_async_,
    grouped_allreduce_async_,
    sparse_allreduce_async,
    synchronize,
)


class GradientReduction:
    """Submits each gradient when autograd has it; `finish` waits for all and puts the results into the gradients."""

    def __init__(
        self, names: dict[Tensor, str], groups: Sequence[Sequence[Tensor]], compression: type[Compressor], passes: int, op: int,
        predivide: float, sparse_as_dense: bool, sparse: bool, process_set: ProcessSet,
    ) -> None:  # fmt: skip
        """names: of the parameters. groups: parameters that are reduced together. passes: backward passes for each step.

        sparse: whether the optimizer takes no dense gradients.
        """
        self.passes = passes
        self._names, self._compression, self._op, self._process_set = names, compression, op, process_set
        self._scales = (1.0 / predivide, predivide) if op == Average else (1.0, 1.0)
        self._sparse_as_dense = sparse_as_dense
        self._group_of = {parameter: tuple(group) for group in groups for parameter in group}
        self.left = dict.fromkeys(names, passes)
        """The backward passes of each parameter that are still to come before its gradient is reduced."""
        self._sparse_dims = dict.fromkeys(names, 1) if sparse else {}
        """Dims of the gradients that are known to be sparse."""
        self._ready: set[Tensor] = set()
        self._results: dict[Tensor, Callable[[], None]] = {}
        self._watch(names)

    @property
    def running(self) -> list[Tensor]:
        """The parameters whose gradients have been submitted since the last `finish`."""
        return list(self._results)

    def add(self, names: dict[Tensor, str]) -> None:
        """Reduce the gradients of these parameters, too."""
        self._names |= names
        self.left |= dict.fromkeys(names, self.passes)
        self._watch(names)

    def _watch(self, parameters: Iterable[Tensor]) -> None:
        """Call `_arrived` for each gradient, as long as this object lives: a model may get another optimizer."""
        this = weakref.ref(self)

        def arrived(parameter: Tensor) -> None:
            reduction = this()
            if reduction is not None:
                reduction._arrived(parameter)

        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(arrived)

    def set_passes(self, passes: int) -> None:
        """The backward passes for each step, from now on."""
        self.passes = passes
        self.left = dict.fromkeys(self._names, passes)

    def forget(self) -> None:
        """Wait for what is in flight, and drop it, whatever has become of it."""
        results = self._begin_anew()
        for put in results.values():
            with suppress(HorovodInternalError):
                put()

    def finish(self) -> None:
        """Submit the gradients that did not arrive, as zeros; wait for all."""
        for parameter in self._names:
            if parameter.requires_grad and parameter not in self._results and parameter not in self._ready:
                self._fill(parameter)
                self._submit_with_group(parameter)
        self.finish_submitted()

    def finish_submitted(self) -> None:
        """Wait for the gradients that were submitted."""
        for put in self._begin_anew().values():
            put()

    def _begin_anew(self) -> dict[Tensor, Callable[[], None]]:
        """Return what was in flight; from now on nothing is."""
        results, self._results = self._results, {}
        self._ready.clear()
        self.left = dict.fromkeys(self._names, self.passes)
        return results

    def _arrived(self, parameter: Tensor) -> None:
        if self.left[parameter] <= 0:
            raise AssertionError(
                f"found another backward pass for {self._names[parameter]} before optimizer.step(), expected {self.passes} for "
                "each step; pass backward_passes_per_step to DistributedOptimizer to accumulate gradients"
            )
        self.left[parameter] -= 1
        if self.left[parameter] == 0:
            self._submit_with_group(parameter)

    def _submit_with_group(self, parameter: Tensor) -> None:
        group = self._group_of.get(parameter)
        if group is None:
            self._submit(parameter)
            return
        self._ready.add(parameter)
        if self._ready.issuperset(one for one in group if one.requires_grad):
            self._submit_group([one for one in group if one.requires_grad])

    def _fill(self, parameter: Tensor) -> None:
        """Zeros for a gradient that is not there: without entries if it is a sparse one elsewhere."""
        if parameter.grad is None:
            parameter.grad = zeros_of(parameter, self._sparse_dims.get(parameter))

    def _submit(self, parameter: Tensor) -> None:
        gradient = self._gradient(parameter)
        if gradient.is_sparse and not self._sparse_as_dense:
            gather = sparse_allreduce_async(gradient, self._names[parameter], self._op, self._process_set)
            self._results[parameter] = lambda: setattr(parameter, "grad", gather())
            return
        tensor, context = self._packed(parameter)
        handle = allreduce_async_(
            tensor, name=self._names[parameter], op=self._op, prescale_factor=self._scales[0],
            postscale_factor=self._scales[1], process_set=self._process_set,
        )  # fmt: skip
        self._results[parameter] = lambda: self._put(parameter, synchronize(handle), context)

    def _submit_group(self, group: Sequence[Tensor]) -> None:
        pairs = [self._packed(parameter) for parameter in group]
        handle = grouped_allreduce_async_(
            [tensor for tensor, _ in pairs], name=self._names[group[0]], op=self._op, prescale_factor=self._scales[0],
            postscale_factor=self._scales[1], process_set=self._process_set,
        )  # fmt: skip

        def put() -> None:
            for parameter, result, (_, context) in zip(group, synchronize(handle), pairs, strict=True):
                self._put(parameter, result, context)

        self._results[group[0]] = put
        for parameter in group[1:]:
            self._results[parameter] = _nothing

    def _gradient(self, parameter: Tensor) -> Tensor:
        gradient = parameter.grad
        assert gradient is not None  # its hook has run, or zeros were put there
        if gradient.is_sparse:
            self._sparse_dims[parameter] = gradient.sparse_dim()
        return gradient

    def _packed(self, parameter: Tensor) -> tuple[Tensor, Any]:
        gradient = self._gradient(parameter)
        tensor, context = self._compression.compress(gradient.to_dense() if gradient.is_sparse else gradient)
        return tensor.contiguous(), context

    def _put(self, parameter: Tensor, result: Tensor, context: Any) -> None:
        found = self._compression.decompress(result, context)
        gradient = parameter.grad
        if parameter in self._sparse_dims:
            parameter.grad = found.to_sparse(self._sparse_dims[parameter])
        elif gradient is None or gradient.shape != found.shape:
            parameter.grad = found
        elif found.data_ptr() != gradient.data_ptr():
            gradient.copy_(found)


def grouped(parameters: Sequence[Tensor], groups: Any, num_groups: int) -> list[list[Tensor]]:
    """The groups that a caller asks for: lists of parameters, or a number of groups. Raises ValueError."""
    if num_groups and groups is not None:
        raise ValueError("found both groups and num_groups, expected one of them")
    if isinstance(groups, int):
        num_groups, groups = groups, None
    if num_groups < 0:
        raise ValueError(f"found {num_groups} groups, expected 0 or more")
    if groups is None and not num_groups:
        return []
    if num_groups:
        bounds = [len(parameters) * place // num_groups for place in range(num_groups + 1)]
        parts = [list(parameters[begin:end]) for begin, end in pairwise(bounds)]
        return [part for part in parts if part]
    if not isinstance(groups, list) or any(
        isinstance(group, Tensor) or not isinstance(group, Iterable) for group in groups
    ):
        raise ValueError("found groups that are not lists, expected a list of lists of parameters")
    known = set(parameters)  # one that the optimizer lacks would never be ready
    made = [[parameter for parameter in group if parameter in known] for group in groups]
    everyone = [parameter for group in made for parameter in group]
    if len(set(everyone)) < len(everyone):
        raise ValueError("found a parameter twice in groups, expected each in one group at most")
    return made


def zeros_of(parameter: Tensor, sparse_dims: int | None) -> Tensor:
    """A gradient of zeros; with `sparse_dims`, a sparse one without entries."""
    if sparse_dims is None:
        return torch.zeros_like(parameter)
    return torch.zeros_like(parameter).to_sparse(sparse_dims)


def _nothing() -> None:
    return None
