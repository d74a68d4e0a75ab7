"""The task that every trainer gets: the job's model with the weights of hpctrain's, its optimizer, and its batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpctrain.api import Batch, Job, LiveModel, Piece, UsageError, forked_random_state, is_accelerator
from hpctrain.job.parts import Parts
from hpctrain.model.parameters import build_optimizer, parameter_groups

_DATA_AXES = ("dp_replicate", "dp_shard")


class LossModule(nn.Module):
    """The job's module and its loss as one module, which any library can wrap: the sum of the losses of a batch."""

    def __init__(self, parts: Parts, device: torch.device, module: nn.Module) -> None:
        super().__init__()
        self.inner, self._parts, self._device = module, parts, device

    def forward(self, batch: Batch) -> Tensor:
        """The sum of the losses of a batch."""
        spec = self._parts.model
        with self._parts.precision.forward(self._device):
            found = spec.loss(spec.forward(self.inner, batch), batch)
        return torch.stack(list(found.values())).sum() if isinstance(found, Mapping) else found


@dataclass(frozen=True)
class Step:
    """A step that hpctrain has trained on this rank. count: the terms of the loss of all ranks; rates: of the optimizer's groups;
    draws: states of the random numbers before each forward, where they were noted."""

    batches: Sequence[Batch]
    count: int
    own_count: int
    rates: Sequence[float]
    draws: Sequence[Sequence[Tensor]]


@dataclass(frozen=True)
class Task:
    """The model of a job before its first step."""

    job: Job
    parts: Parts
    model: LiveModel
    ranks: int

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.model.device

    def hindrance(self) -> str:
        """The reason why only hpctrain trains this job as it is; "" for none."""
        shared = [axis for axis, (_, size) in self.model.place.items() if size > 1 and axis not in _DATA_AXES]
        if shared:
            return (
                f"[parallelism] {', '.join(shared)} cuts the model or its sequences, and plain loops train whole ones"
            )
        scaler = self.parts.precision.start()
        if scaler.scale != 1 or scaler.skips_nonfinite:
            return f"[precision] {self.parts.precision.name} scales the loss, and plain loops do not"
        return ""

    def module(self) -> nn.Module:
        """A copy of the whole model on this rank's device. Collective."""
        spec = self.parts.model
        with forked_random_state(self.device), torch.device(self.device):
            module = spec.build()
        module.to(device=self.device, dtype=self.parts.precision.parameter_dtype)
        self.parts.precision.convert(module, spec)
        with torch.no_grad():
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                tensor.copy_(
                    self.model.value(name) if name in self.model.shapes else self._untrained(name, tensor.shape)
                )
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in self.model.shapes)
        return module.train()

    def _untrained(self, name: str, shape: torch.Size) -> Tensor:
        """The value of a buffer or of a frozen parameter. Collective. Raises UsageError for one that this rank has not whole."""
        path, _, attribute = name.rpartition(".")
        tensor: Tensor = getattr(self.model.module.get_submodule(path), attribute)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if whole.shape != shape:
            raise UsageError(
                f"{name} lies on this rank as {tuple(whole.shape)}, expected {tuple(shape)}: take [sharding] stage 0"
            )
        return whole

    def optimizer(self, module: nn.Module, prefix: str = "") -> torch.optim.Optimizer:
        """The job's optimizer over the trained parameters. prefix: of their names in `module`."""
        named = [(name.removeprefix(prefix), one) for name, one in module.named_parameters() if one.requires_grad]
        pieces = [Piece(name, tuple(one.shape), (0,) * one.dim(), one) for name, one in named]
        groups = parameter_groups(pieces, {name: one.shape for name, one in named}, self.parts.optimizer_groups)
        return build_optimizer(self.parts.optimizer, groups)

    def draws(self) -> list[Tensor]:
        """The states of this rank's random numbers."""
        states = [torch.get_rng_state()]
        if is_accelerator(self.device):
            states.append(torch.get_device_module(self.device.type).get_rng_state(self.device))
        return states

    def restore(self, draws: Sequence[Tensor]) -> None:
        """Go back to states that `draws` gave."""
        torch.set_rng_state(draws[0])
        if len(draws) > 1:
            torch.get_device_module(self.device.type).set_rng_state(draws[1], self.device)

    def wait(self) -> None:
        """Wait for the device."""
        if is_accelerator(self.device):
            torch.get_device_module(self.device.type).synchronize(self.device)
