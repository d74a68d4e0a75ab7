"""DistributedOptimizer: a torch optimizer whose step takes gradients that were reduced over the ranks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hpctrain_horovod.common.process_sets import ProcessSet, global_process_set
from hpctrain_horovod.torch.compression import Compression, Compressor
from hpctrain_horovod.torch.gradients import GradientReduction, grouped
from hpctrain_horovod.torch.mpi_ops import Adasum, Average, allreduce_async_, size, synchronize

_Options = Callable[[], float] | None


class _DistributedOptimizer(torch.optim.Optimizer):
    """Put in front of the optimizer's own class. Other libraries read the attributes that have the original's names."""

    op: int
    process_set: ProcessSet
    _compression: type[Compressor]
    backward_passes_per_step: int
    gradient_predivide_factor: float
    sparse_as_dense: bool
    _parameter_names: dict[Tensor, str]
    _reduction: GradientReduction | None
    _should_synchronize = True
    _synchronized = False

    @property
    def _requires_update(self) -> set[Tensor]:
        """The parameters whose gradients are reduced."""
        return {one for one in self._parameter_names if one.requires_grad} if self._reduction is not None else set()

    @property
    def _handles(self) -> list[Tensor]:
        """The parameters whose gradients are being reduced."""
        return [] if self._reduction is None else self._reduction.running

    @property
    def _allreduce_delay(self) -> dict[Tensor, int]:
        """How many backward passes of each parameter are still to come before its gradient is reduced."""
        if self._reduction is None:
            return dict.fromkeys(self._parameter_names, self.backward_passes_per_step)
        return self._reduction.left

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. `step` does this unless called inside `skip_synchronize`."""
        if self._reduction is not None:
            self._reduction.finish()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A block in which `step` does not wait: the caller has called `synchronize`, to clip gradients, say."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """The backward passes for each step, from now on."""
        self.backward_passes_per_step = passes
        if self._reduction is not None:
            self._reduction.set_passes(passes)

    def step(self, closure: _Options = None) -> Any:
        """Wait for the gradients and update the parameters. A closure's gradients are waited for each time that it is called."""
        if closure is not None and self._should_synchronize:
            result = super().step(self._reduced(closure))
            self._synchronized = False
            return result
        if self._should_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize(): it reduces the gradients again after "
                    "optimizer.synchronize(); call it inside `with optimizer.skip_synchronize():`",
                    stacklevel=2,
                )
            self.synchronize()
        self._synchronized = False
        return super().step(closure)

    def _reduced(self, closure: Callable[[], float]) -> Callable[[], float]:
        def call() -> float:
            loss = closure()
            self.synchronize()
            return loss

        return call

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch's method does; the new parameters' gradients are reduced, too. All ranks add the same groups in
        the same order."""
        super().add_param_group(param_group)
        known, added = len(self._parameter_names), self.param_groups[-1]["params"]
        new = {parameter: f"added.{known + place}" for place, parameter in enumerate(added)}
        self._parameter_names |= new
        if self._reduction is not None:
            self._reduction.add(_operations(new))

    def zero_grad(self, *arguments: Any, **options: Any) -> None:
        """Clear gradients as torch's method does. Raises AssertionError between backward and step."""
        if self._reduction is not None and self._reduction.running:
            self._reduction.forget()
            raise AssertionError(
                "found optimizer.zero_grad() between loss.backward() and optimizer.step() or optimizer.synchronize(), which "
                "would race with the reduction of the gradients"
            )
        super().zero_grad(*arguments, **options)

    def load_state_dict(self, *arguments: Any, **options: Any) -> None:
        """Load a state as torch's method does; gradients in flight are dropped."""
        if self._reduction is not None:
            self._reduction.forget()
        super().load_state_dict(*arguments, **options)


class _DistributedAdasumOptimizer(torch.optim.Optimizer):
    """Each rank makes its own step; the ranks' updates are combined by Adasum."""

    _compression: type[Compressor]
    _parameter_names: dict[Tensor, str]

    def synchronize(self) -> None:
        """Nothing: `step` combines the updates."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: with Adasum no gradients are reduced before the step."""
        raise AssertionError("found skip_synchronize with op=hvd.Adasum, which reduces updates, not gradients")
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Nothing: `step` combines the updates, however many backward passes there were."""

    def step(self, closure: _Options = None) -> Any:
        """Make this rank's step, and replace it by the adaptive sum of all."""
        before = {parameter: parameter.detach().clone() for parameter in self._parameter_names}
        result = super().step(closure)
        moving = []
        for parameter, name in _operations(self._parameter_names).items():
            update, context = self._compression.compress((parameter.detach() - before[parameter]).contiguous())
            moving.append((parameter, update, context, allreduce_async_(update, name=name, op=Adasum)))
        for parameter, update, context, handle in moving:
            synchronize(handle)
            with torch.no_grad():
                parameter.copy_(before[parameter] + self._compression.decompress(update, context))
        return result


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none, backward_passes_per_step: int = 1, op: int = Average,
    gradient_predivide_factor: float = 1.0, num_groups: int = 0, groups: Sequence[Sequence[Tensor]] | int | None = None,
    sparse_as_dense: bool = False, process_set: ProcessSet = global_process_set,
) -> Any:  # fmt: skip
    """The optimizer, as an instance of its own class that reduces gradients over the ranks before each step.

    named_parameters: names under which gradients are matched; by default their places. backward_passes_per_step: gradients of
    this many backward passes are added before they are reduced. gradient_predivide_factor: divides before the sum and
    multiplies after it. groups: lists of parameters that are reduced together, or their number (also as `num_groups`), for lists
    of about equal length.
    Raises ValueError for names or options that do not go together, TypeError for an optimizer that this function has made.
    """
    if isinstance(optimizer, (_DistributedOptimizer, _DistributedAdasumOptimizer)):
        raise TypeError(
            f"found a {type(optimizer).__name__} that hvd.DistributedOptimizer has made, expected a plain optimizer: gradients "
            "would be reduced twice; wrap it once, with all options"
        )
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("found gradient_predivide_factor with another op, expected op=hvd.Average")
    if backward_passes_per_step < 1:
        raise ValueError(f"found backward_passes_per_step={backward_passes_per_step}, expected 1 or more")
    names = _names_of(optimizer, named_parameters)
    together = grouped(list(names), groups, num_groups)
    adaptive = op == Adasum
    if adaptive and process_set is not global_process_set:
        raise ValueError("found op=hvd.Adasum with a process set, expected the set of all ranks")
    mixin = _DistributedAdasumOptimizer if adaptive else _DistributedOptimizer
    # by "horovod" in the name of its type other libraries tell an optimizer that is wrapped
    made: Any = object.__new__(type(type(optimizer).__name__, (mixin, type(optimizer)), {"__module__": __name__}))
    # a scheduler that was made before has put its wrapper of the plain step there
    made.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    made._compression, made._parameter_names = compression, names
    made.backward_passes_per_step, made.op, made.process_set = backward_passes_per_step, op, process_set
    if adaptive:
        return made
    made.gradient_predivide_factor, made.sparse_as_dense = gradient_predivide_factor, sparse_as_dense
    made._reduction = None
    grows = os.environ.get("HOROVOD_ELASTIC") == "1"  # other workers may come
    if process_set.included() and (size() > 1 or grows):
        sparse = isinstance(optimizer, torch.optim.SparseAdam)
        made._reduction = GradientReduction(
            _operations(names), together, compression, backward_passes_per_step, op, gradient_predivide_factor, sparse_as_dense,
            sparse, process_set,
        )  # fmt: skip
    return made


def _names_of(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None) -> dict[Tensor, str]:
    """A name for each of the optimizer's parameters. Raises ValueError."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if named is None:
        return {parameter: str(place) for place, parameter in enumerate(parameters)}
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str) for pair in pairs):
        raise ValueError("found named_parameters that are not (name, parameter) pairs; pass model.named_parameters()")
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"found the names {twice} more than once in named_parameters, expected each once")
    known = {parameter: name for name, parameter in pairs}
    missing = sum(parameter not in known for parameter in parameters)
    if missing:
        raise ValueError(
            f"found {missing} parameters of the optimizer that named_parameters lacks; pass model.named_parameters() of "
            "every model that it trains"
        )
    return {parameter: known[parameter] for parameter in parameters}


def _operations(names: dict[Tensor, str]) -> dict[Tensor, str]:
    """The names of the operations that reduce the gradients of parameters with these names."""
    return {parameter: f"gradient.{name}" for parameter, name in names.items()}
