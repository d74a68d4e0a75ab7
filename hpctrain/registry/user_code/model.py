"""Any torch.nn.Module as a model: built under the seed, with a loss of the user's choice."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from hpctrain.base.devices import forked_random_state
from hpctrain.base.errors import TrainingError, UsageError
from hpctrain.base.torch_private import children_of, version_of
from hpctrain.contracts.model import Batch, ModelSpec, PipelineModel, map_tensors, tensors_in, trained_loss
from hpctrain.registry.blame import users_code
from hpctrain.registry.user_code.reference import refuse_arguments, resolve, resolve_for

# elements of a sample's outputs up to which its loss is tried; more might not fit beside the activations
_MANY = 2**24
# relative; in 16 bits, numbers are within a hundredth
_OF_A_SUM = 0.05


@dataclass(frozen=True)
class Structure:
    """The names of a model's modules. `before` and `after` are empty if it doesn't show how values pass between its parts."""

    blocks: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


class UserModel(PipelineModel):
    """The target is the last entry of a list batch, or `labels` of a dict batch; the other entries go into the module."""

    name = "package.module:callable"
    counts: ClassVar[str] = "samples"

    def __init__(
        self, reference: str, factory: Callable[..., nn.Module], loss: Callable[..., Any], options: dict[str, Any]
    ):
        super().__init__(options)
        self.name = reference  # type: ignore[misc]  # as in the job file, for messages
        self._factory, self._loss = factory, loss
        # the structure of each built module, before any axis has cut it
        self._structures: WeakKeyDictionary[nn.Module, Structure] = WeakKeyDictionary()

    @classmethod
    def from_table(cls, reference: str, loss: object, options: dict[str, Any]) -> UserModel:
        """Raise UsageError for a callable that does not exist or does not take the options."""
        factory = resolve(reference)
        refuse_arguments(reference, factory, options)
        if not isinstance(loss, str):
            raise UsageError(
                f'{reference} needs [model] loss = "package.module:callable", such as "torch.nn.functional:cross_entropy"'
            )
        return cls(reference, factory, resolve_for(f"the loss {loss}", loss, "outputs and target", 2), options)

    def build(self) -> nn.Module:
        with users_code(f"[model] name = {self.name!r}"):
            module = self._factory(**self.options)
        if not isinstance(module, nn.Module):
            raise UsageError(
                f"[model] name = {self.name!r} returned {type(module).__name__}, expected a torch.nn.Module"
            )
        self._structures[module] = _structure_of(module)
        for inner in module.modules():  # a decoder may have its own configuration
            config: Any = getattr(inner, "config", None)
            if getattr(config, "use_cache", None) is True:
                # transformers' cache of keys and values for generation; a recomputed forward would add them twice
                config.use_cache = False
        return module

    def _structure(self, module: nn.Module) -> Structure:
        """The module's structure; empty for a module built elsewhere."""
        return self._structures.get(module, Structure())

    def blocks(self, module: nn.Module) -> list[nn.Module]:
        return _present(module, self._structure(module).blocks)

    def ends(self, module: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        structure = self._structure(module)
        return _present(module, structure.before), _present(module, structure.after)

    def embed(self, module: nn.Module, batch: Batch) -> Tensor:
        positional, keywords = self._inputs(batch)
        (value,) = (*positional, *keywords.values())  # an nn.Sequential takes one
        for layer in self.ends(module)[0]:
            value = layer(value)
        return value  # type: ignore[no-any-return]

    def head(self, module: nn.Module, hidden: Tensor) -> Any:
        for layer in self.ends(module)[1]:
            hidden = layer(hidden)
        return hidden

    def forward(self, module: nn.Module, batch: Batch) -> Any:
        positional, keywords = self._inputs(batch)
        return module(*positional, **keywords)

    @staticmethod
    def _inputs(batch: Batch) -> tuple[Sequence[Any], dict[str, Any]]:
        if isinstance(batch, Mapping):
            return (), {key: value for key, value in batch.items() if key != "labels"}
        return batch[:-1], {}

    def count(self, batch: Batch) -> int:
        """Samples: the rows of the target."""
        return len(self.target(batch))

    def loss(self, outputs: Any, batch: Batch) -> Tensor | Mapping[str, Tensor]:
        """The sum of the loss: the user's scalar counts as the mean over the micro batch's rows, a tensor (rows,) as one loss per
        row, and of a dict each value. Raises TrainingError for other shapes: they don't say whether to sum or to average."""
        target = self.target(batch)
        before = None if torch.compiler.is_compiling() or target.is_inference() else version_of(target)
        value = self._loss(outputs, target)
        if before is not None and version_of(target) != before:
            raise TrainingError(
                f"the loss of {self.name} changed its target in place, expected a copy: metrics measure it, too"
            )
        if isinstance(value, Mapping) and value:
            return {str(name): self._sum(loss, len(target), f" {name!r}") for name, loss in value.items()}
        return self._sum(value, len(target), "")

    def _sum(self, value: Any, rows: int, which: str) -> Tensor:
        if not isinstance(value, Tensor):
            raise TrainingError(
                f"the loss{which} of {self.name} is {type(value).__name__}, expected a tensor, or a dict of tensors by name"
            )
        if value.dim() == 0:
            return value * rows  # the loop divides by all rows of a step: docs/decisions/0004
        if value.shape != (rows,):
            mean = ".flatten(1).mean(1)" if value.dim() > 1 and value.shape[0] == rows else ".mean()"
            raise TrainingError(
                f"the loss{which} of {self.name} has the shape {tuple(value.shape)}, expected a scalar, its mean over the "
                f"micro batch, or ({rows},), one loss per row: return loss{mean}"
            )
        return value.sum()

    def target(self, batch: Batch) -> Tensor:
        if not isinstance(batch, (Mapping, Sequence)):
            raise TrainingError(
                f"found samples of the type {type(batch).__name__}, expected (input, target), or a dict with labels"
            )
        target = batch["labels"] if isinstance(batch, Mapping) else batch[-1]
        if not isinstance(target, torch.Tensor):
            raise TrainingError(f"expected a batch whose target is a tensor, found {type(target).__name__}")
        return target


def _structure_of(module: nn.Module) -> Structure:
    """Find the blocks: consecutive modules of one class in an nn.ModuleList or nn.Sequential that have submodules.

    A list inside a block is part of that block. In an nn.Sequential the modules before and after the blocks are known.
    """
    blocks = tuple(_blocks(module, ""))
    if not blocks or type(module).forward is not nn.Sequential.forward:  # only its forward is a chain for certain
        return Structure(blocks)
    # not named_children, which lists a module in several places only once, although it runs in each
    names = tuple(children_of(module))
    if blocks[0] not in names:
        return Structure(blocks)
    first = names.index(blocks[0])
    end = first + len(blocks)
    return Structure(blocks, names[:first], names[end:]) if names[first:end] == blocks else Structure(blocks)


def _present(module: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    """The modules of these names that are on this rank; a pipeline puts None in the place of others."""
    paths = (name.rpartition(".") for name in names)
    modules = (getattr(module.get_submodule(parent), last) for parent, _, last in paths)
    return [module for module in modules if module is not None]


def _blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for kind, group in groupby(module.named_children(), key=lambda entry: type(entry[1])):
        run = list(group)
        # the trainer acts on a block when it is called, so a module without a forward is no block
        calls = kind.forward is not nn.Module.forward
        if is_list and len(run) > 1 and calls and all(any(True for _ in inner.children()) for _, inner in run):
            yield from (prefix + name for name, _ in run)
        else:
            for name, inner in run:
                yield from _blocks(inner, f"{prefix}{name}.")


def try_loss(spec: ModelSpec, outputs: Any, batch: Batch, device: torch.device) -> str:
    """A sentence on a user's loss that is a sum where a mean is due: two equal samples have four times the loss of one.

    "" where there is no telling what a sample is, or the loss fails on it. Every rank that has outputs calls the loss as often,
    since it may communicate.
    """
    rows = {len(tensor) if tensor.dim() else 0 for tensor in tensors_in([outputs, batch])}
    if not isinstance(spec, UserModel) or len(rows) != 1 or 0 in rows:
        return ""
    if sum(tensor[:1].numel() for tensor in tensors_in(outputs)) > _MANY:
        return ""
    try:
        # a copy of the loss: calls of an object may change it
        trial = UserModel(spec.name, spec._factory, copy.deepcopy(spec._loss), spec.options)
        once, twice = ((_repeated(outputs, count), _repeated(batch, count)) for count in (1, 2))
        with torch.no_grad(), forked_random_state(device):
            single, double = (_by_name(trained_loss(trial.loss(*samples))) for samples in (once, twice))
    except Exception:  # a loss may need outputs of a kind, or all rows
        return ""
    for name, value in single.items():
        if abs(value) > 1e-6 and abs(double[name] - 4 * value) <= _OF_A_SUM * abs(value):
            growth = f"{value:.4g} for a sample, {double[name] / 2:.4g} for it twice"
            return (
                f"the loss{name} of {spec.name} grows with the number of samples ({growth}): gradients change with [batch] "
                "micro_size and the ranks; a mean over the micro batch, or a loss for each row, does not"
            )
    return ""


def _repeated(value: Any, count: int) -> Any:
    """The first row of each tensor, `count` times."""
    return map_tensors(lambda tensor: torch.cat([tensor.detach()[:1]] * count), value)


def _by_name(loss: Tensor | Mapping[str, Tensor]) -> dict[str, float]:
    losses = {f" {name!r}": value for name, value in loss.items()} if isinstance(loss, Mapping) else {"": loss}
    return {name: float(value) for name, value in losses.items()}
