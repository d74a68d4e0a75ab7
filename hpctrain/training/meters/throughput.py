"""Floating-point operations of a step: the model's, whatever the layout and however often something is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from hpctrain.base.devices import device_name, is_accelerator
from hpctrain.base.flops import CountedFlops
from hpctrain.contracts.model import tensors_in
from hpctrain.contracts.precision import Precision
from hpctrain.contracts.runner import MicroBatch
from hpctrain.job.machines import machine_of_device, peak_flops_of

_TRAINING = 3
"""The operations of a training to those of its forwards: backward has two products for each of forward's, by the inputs and by the
parameters (Kaplan et al., "Scaling Laws for Neural Language Models", 2020, section 2.1)."""


class ModelFlops:
    """Counts this rank's share of a step's operations: what `ModelSpec.flops` says, else what the first step's forwards took.

    Where the compiler makes the operators, nobody counts them.
    """

    def __init__(self, copies: int, countable: bool, is_forward: Callable[[], bool]) -> None:
        """copies: ranks that work on one micro batch. countable: whether torch sees each operator. is_forward: whether the rank is
        in the phase "forward"; backwards compute forwards again, and a pipeline's first step tries one."""
        self._copies, self._countable, self._is_forward = copies, countable, is_forward
        self._per_element = 0.0

    @contextmanager
    def counting(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """A context for the forwards of a step."""
        if not self._countable or any(micro.flops is not None for micro in micro_batches):
            yield
            return
        self._countable = False
        with CountedFlops(self._is_forward) as counted:
            yield
        self._per_element = _TRAINING * counted.total / max(1, _elements(micro_batches))

    def count_again(self) -> None:
        """Count the next step anew: this one left forwards out."""
        self._countable, self._per_element = self._countable or bool(self._per_element), 0.0

    def of(self, micro_batches: Sequence[MicroBatch]) -> float:
        """The share of these; all ranks' shares together are the step's. 0 if nobody has counted."""
        told = [micro.flops for micro in micro_batches if micro.flops is not None]
        return sum(told) / self._copies if told else self._per_element * _elements(micro_batches)


def _elements(micro_batches: Sequence[MicroBatch]) -> int:
    """The numbers that a step reads, by which the operations of later steps follow from those of the first."""
    return sum(tensor.numel() for micro in micro_batches for tensor in tensors_in(micro.batch))


def peak_flops(device: torch.device, precision: Precision) -> float | None:
    """FLOP/s of the device in the precision's arithmetic, as its vendor states them; None for others than the known ones."""
    machine = machine_of_device(device_name(device)) if is_accelerator(device) else None
    dtype = str(precision.product_dtype(device)).removeprefix("torch.")
    return None if machine is None else peak_flops_of(machine["flops"], dtype, precision.name == "tf32")
