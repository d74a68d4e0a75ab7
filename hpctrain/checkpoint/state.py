"""The state of a training as pieces: model, buffers and optimizer, named as in the single-process model."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.errors import CheckpointError, UsageError, shown
from hpctrain.contracts.pieces import Piece, pieces_of
from hpctrain.model.parameters import named_tensors

MODEL = "model/"
"""The prefix of the model's parameters in hpctrain's checkpoints."""
PLUGIN = "plugin/"
"""The prefix of the state of plugins (PluginState). Optional in a checkpoint: a run can do without it."""
SOURCE = "source"
"""The key of a checkpoint's value that tells where the values that it leaves out came from."""
TIED = "tied"
"""The key of a checkpoint's value that lists the names of each tied parameter, the stored name first."""
OPTIMIZER = "optimizer/"
COMPRESSION = "compression/"
"""The prefix of the state of gradient compression, such as error feedback. Optional in a checkpoint: a run can do without it."""

# the number of parts in which the state of one of torch's optimizers is created
_PARTS = 16


def model_pieces(
    module: nn.Module, trained: Sequence[Piece], names: Collection[str], left_out: Collection[str] = ()
) -> list[Piece]:
    """The pieces in `trained`, and this rank's part of everything else in the module (frozen parameters, buffers).

    names: the full model's trained parameters, whether or not a program has frozen them for a while or this rank has a piece.
    left_out: frozen parameters whose values the model finds elsewhere (`MetaModel.is_given`).
    """
    tensors = [(name, tensor) for name, tensor in named_tensors(module) if name not in left_out]
    # buckets, and so `trained`, leave out parameters without elements; a checkpoint names them
    rest = [(name, tensor) for name, tensor in tensors if name not in names or not tensor.numel()]
    return [*trained, *(piece for name, tensor in rest for piece in pieces_of(module, name, tensor.detach()))]


def state_pieces(
    module: nn.Module,
    trained: Sequence[Piece],
    names: Collection[str],
    optimizer: torch.optim.Optimizer,
    left_out: Collection[str] = (),
) -> list[Piece]:
    """This rank's pieces of all of a checkpoint's tensors. The optimizer's state must exist: see `create_state`. names and
    left_out: see `model_pieces`.

    UsageError if a parameter is cut over ranks and its state isn't cut the same way.
    """
    of_model = model_pieces(module, trained, names, left_out)
    pieces = [replace(p, name=MODEL + p.name, tensor=p.tensor.detach()) for p in of_model]
    for piece in trained:
        for key, value in optimizer.state[piece.tensor].items():
            name = f"{OPTIMIZER}{piece.name}/{key}"
            if not isinstance(value, Tensor):
                continue  # see optimizer_numbers
            # its blocks belong to one layout: docs/decisions/0022; in host memory: a device may lack room for four times its bytes
            saved = value.cpu().dequantize() if _is_quantized(value) else value
            same = value.shape == piece.tensor.shape
            # the place of any other shape in the full model's state is unknown
            if not same and value.numel() != 1 and piece.tensor.shape != piece.shape:
                raise UsageError(
                    f"[optimizer] name: {type(optimizer).__name__} keeps {key!r} of the shape {list(value.shape)} for the part "
                    f"{list(piece.tensor.shape)} of {piece.name} {list(piece.shape)} that a rank holds; state of a parameter that "
                    "is cut over ranks must be a number or have the part's shape: use another optimizer, such as adamw, or "
                    "[sharding] stage 0 without tensor parallelism"
                )
            pieces.append(replace(piece, name=name, tensor=saved) if same else Piece.whole(name, saved))
    return pieces


def restore_quantized(trained: Sequence[Piece], optimizer: torch.optim.Optimizer, restored: Sequence[Piece]) -> None:
    """Copy the pieces in `restored`, dequantized copies from `state_pieces`, back into the optimizer's quantized state."""
    read = {(piece.name, piece.offsets): piece.tensor for piece in restored}
    for piece in trained:
        for key, value in optimizer.state[piece.tensor].items():
            if isinstance(value, Tensor) and _is_quantized(value):
                value.copy_(read[f"{OPTIMIZER}{piece.name}/{key}", piece.offsets].to(value.device))


def _is_quantized(tensor: Tensor) -> bool:
    """Whether it is a tensor subclass made of other tensors, which file formats don't support."""
    return hasattr(tensor, "__tensor_flatten__")  # torch asks its wrapper subclasses to have it


def optimizer_numbers(trained: Sequence[Piece], optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """The optimizer's state outside of tensors (such as a step count), by parameter. UsageError unless it consists of numbers."""
    numbers: dict[str, dict[str, Any]] = {}
    for piece in trained:
        for key, value in optimizer.state[piece.tensor].items():
            if isinstance(value, (Real, type(None))):
                numbers.setdefault(piece.name, {})[key] = value
            elif not isinstance(value, Tensor):
                raise UsageError(
                    f"[optimizer] name: its state {key!r} of {piece.name} is of type {type(value).__name__}; a checkpoint "
                    "holds tensors and numbers: use another optimizer"
                )
    return numbers


def restore_numbers(
    trained: Sequence[Piece], optimizer: torch.optim.Optimizer, numbers: dict[str, dict[str, Any]]
) -> None:
    """Restore the result of `optimizer_numbers`. CheckpointError if this optimizer keeps something else under a key."""
    for piece in trained:
        state = optimizer.state[piece.tensor]
        for key, value in numbers.get(piece.name, {}).items():
            _refuse_other_kind(f"{piece.name}/{key}", state.get(key), value)
            state[key] = value


def group_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group, without its parameters and its learning rate, which the loop sets."""
    return [
        # copies: a step may change a list or a tensor in place
        {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "lr")}
        for group in optimizer.param_groups
    ]


def group_numbers(optimizer: torch.optim.Optimizer, first: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The options that steps have changed since the `first` ones: some optimizers count there, not in their state.

    UsageError unless they are numbers.
    """
    numbers: list[dict[str, Any]] = []
    for now, before in zip(group_options(optimizer), first, strict=True):
        changed = {key: value for key, value in now.items() if key not in before or not _is_same(value, before[key])}
        for key, value in changed.items():
            if not isinstance(value, (Real, type(None))):
                raise UsageError(
                    f"[optimizer] name: {type(optimizer).__name__} changes {key!r} of its parameter groups, which is of type "
                    f"{type(value).__name__}; a checkpoint holds numbers there: use another optimizer"
                )
        numbers.append(changed)
    return numbers


def restore_group_numbers(
    optimizer: torch.optim.Optimizer, first: Sequence[dict[str, Any]], numbers: Sequence[dict[str, Any]]
) -> None:
    """Restore the result of `group_numbers`, on top of the `first` options. CheckpointError if the groups differ."""
    groups = optimizer.param_groups
    if numbers and len(numbers) != len(groups):
        raise CheckpointError(
            f"the checkpoint has counters for {len(numbers)} optimizer parameter groups, but this job has {len(groups)}; "
            "give it the same [[optimizer.groups]], or start anew in another output_dir with these weights"
        )
    for group, options, counted in zip(groups, first, numbers or [{}] * len(groups), strict=True):
        for key, value in counted.items():
            _refuse_other_kind(f"parameter group's {key}", group.get(key), value)
        group.update({**options, **counted})


def _refuse_other_kind(name: str, before: object, saved: object) -> None:
    """CheckpointError unless a number replaces a number or None."""
    if before is not None and not (isinstance(before, Real) and isinstance(saved, Real)):
        raise CheckpointError(
            f"the checkpoint has {shown(saved)} for the optimizer's {name}, expected a replacement for {shown(before)}: "
            "take another checkpoint with --resume PATH"
        )


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)  # == has no single answer for them
    return type(value) is type(other) and bool(value == other)


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its state, as its first step would, without changing a parameter.

    torch's optimizers create their state in the first `step()`, but a restore needs the tensors earlier, to fill them.
    If nothing is restored, replace this optimizer with a new one.

    A start must not need more memory than a step, and gradients and copies of all parameters would take 8 bytes for each in
    float32. So torch's own optimizers, which skip parameters without a gradient, step some of them at a time.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    is_torchs = type(optimizer).__module__.startswith("torch.optim.")  # others may need the gradients of all
    for part in _in_parts(parameters) if is_torchs else [parameters]:
        before = [p.detach().clone() for p in part]
        for parameter in part:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(part, before, strict=True):
                parameter.copy_(value)  # weight decay has changed it, even with a gradient of zeros
                parameter.grad = None
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _in_parts(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors with at least a sixteenth of all bytes; the last ones have fewer."""
    limit = max(1, sum(tensor.nbytes for tensor in tensors) // _PARTS)
    part, nbytes = list[Tensor](), 0
    for tensor in tensors:
        part.append(tensor)
        nbytes += tensor.nbytes
        if nbytes >= limit:
            yield part
            part, nbytes = [], 0
    if part:
        yield part
