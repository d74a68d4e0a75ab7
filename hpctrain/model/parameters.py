"""The parameters and buffers of a model: which are tied, which are trained, their groups, and the optimizer over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from hpctrain.base.errors import UsageError
from hpctrain.contracts.optimization import MatrixOptimizer, Optimizer, WholeTensors
from hpctrain.contracts.pieces import Piece
from hpctrain.contracts.plugin import broken

__all__ = ["build_optimizer", "parameter_groups"]

EACH_WHOLE = WholeTensors()
"""The parameters of an optimizer as they are."""


def named_tensors(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Every parameter and every buffer that belongs to the model's state, each once."""
    persistent = module.state_dict(keep_vars=True).keys()
    yield from module.named_parameters()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in persistent)


def tied_parameters(module: nn.Module) -> list[list[str]]:
    """The names of each tied parameter, its main name first."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):  # each place of a tied one, too
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(module: nn.Module, tied: Iterable[list[str]]) -> None:
    """Tie parameters again after each place got its own: all places get the first one's."""
    for first, *others in tied:
        kept = module.get_parameter(first)
        for name in others:
            path, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(path), attribute, kept)


def freeze(module: nn.Module, frozen: Sequence[str], trainable: Sequence[str] | None) -> None:
    """Freeze all parameters that are not in `trained_names`. Raises its UsageErrors."""
    trained = set(trained_names(module, frozen, trainable))
    for name, parameter in module.named_parameters():
        if name not in trained:
            parameter.requires_grad_(False)


def trained_names(module: nn.Module, frozen: Sequence[str], trainable: Sequence[str] | None) -> list[str]:
    """The names of trained parameters: they match a pattern of `trainable` (None: all) and no pattern of `frozen`.

    Raises UsageError if a pattern matches no parameter, or if no parameter is left.
    """
    parameters = list(module.named_parameters())
    for key, patterns in (("freeze", frozen), ("trainable", trainable or ())):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name, _ in parameters):
                names = ", ".join(name for name, _ in parameters[:5])
                raise UsageError(f"[model] {key}: no parameter matches {pattern!r}; the names are like {names}, ...")
    trained = [
        name
        for name, parameter in parameters
        if parameter.requires_grad
        and (trainable is None or any(fnmatchcase(name, pattern) for pattern in trainable))
        and not any(fnmatchcase(name, pattern) for pattern in frozen)
    ]
    if (frozen or trainable is not None) and not trained:
        key = "freeze" if frozen else "trainable"
        raise UsageError(f"[model] {key}: every parameter is frozen, expected at least one to train")
    return trained


def parameter_groups(
    pieces: Sequence[Piece], trained: Mapping[str, Sequence[int]], patterns: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """torch's parameter groups: one for each entry of `patterns`, and one for the other parameters.

    A parameter goes to the first entry that matches. `trained` are the names and shapes of the full model. Raises UsageError for
    an entry that matches none of them. A group with any of these parameters exists on every rank, even if empty there.
    """
    refuse_unmatched(trained, patterns)
    mine = [(_place_of(piece.name, piece.shape, patterns), piece.tensor) for piece in pieces]
    groups = []
    # also those without a tensor here: groups are equal on all ranks, as checkpoints number them
    for place in sorted({_place_of(name, shape, patterns) for name, shape in trained.items()}):
        entry = patterns[place] if place < len(patterns) else {}
        options = {key: value for key, value in entry.items() if key not in ("pattern", "max_dims")}
        groups.append({"params": [tensor for own, tensor in mine if own == place], **options})
    return groups


def refuse_unmatched(trained: Mapping[str, Sequence[int]], patterns: Sequence[dict[str, Any]]) -> None:
    """Raises UsageError for a pattern that matches none of the trained parameters, which are given with their shapes."""
    for entry in patterns:
        for pattern in entry["pattern"]:
            if not any(_matches(name, shape, {**entry, "pattern": [pattern]}) for name, shape in trained.items()):
                of = "" if entry["max_dims"] is None else f" of at most max_dims = {entry['max_dims']} dimensions"
                raise UsageError(
                    f"[[optimizer.groups]]: no trained parameter{of} matches the pattern {pattern!r}; the names are like "
                    f"{', '.join([*trained][:5])}, ..."
                )


def _place_of(name: str, shape: Sequence[int], patterns: Sequence[dict[str, Any]]) -> int:
    """The number of the first entry that matches; that behind the last one if none does."""
    return next((place for place, entry in enumerate(patterns) if _matches(name, shape, entry)), len(patterns))


def _matches(name: str, shape: Sequence[int], entry: Mapping[str, Any]) -> bool:
    is_small = entry["max_dims"] is None or len(shape) <= entry["max_dims"]
    return is_small and any(fnmatchcase(name, pattern) for pattern in entry["pattern"])


def build_optimizer(
    plugin: Optimizer, groups: Sequence[dict[str, Any]], whole: WholeTensors = EACH_WHOLE
) -> torch.optim.Optimizer:
    """The plugin's optimizer over `groups`, each of which gets the plugin's options that it doesn't set.

    whole: for a MatrixOptimizer, where ranks may hold parts.

    Raises UsageError for an optimizer that knows no `lr`, and ContractError unless it has every parameter once, at a learning
    rate that the job names.
    """
    options = plugin.options.model_dump()
    completed = [{**options, **group} for group in groups]
    own = [dict(group) for group in completed]
    optimizer = plugin.build_whole(own, whole) if isinstance(plugin, MatrixOptimizer) else plugin.build(own)
    known = [*optimizer.param_groups, *([optimizer.defaults] if optimizer.defaults else [])]
    if any("lr" not in one for one in known):
        raise UsageError(
            f"[optimizer] name = {plugin.name!r}: its parameter groups or its defaults have no 'lr', which the schedule sets; "
            'expected an optimizer that reads its learning rate from group["lr"]'
        )
    wanted = {id(p): group["lr"] for group in completed for p in group["params"]}  # by id: == compares tensors by value
    held = [(p, group) for group in optimizer.param_groups for p in group["params"]]
    if sorted(id(p) for p, _ in held) != sorted(wanted):
        found = f"built an optimizer of {len(held)} tensors"
        raise broken(plugin, found, f"each of the {len(wanted)} in `groups` once; the others would not be trained")
    named = {value for value in options.values() if isinstance(value, float)}  # a second rate may be an option
    for parameter, group in held:
        rate, of_group = float(group["lr"]), wanted[id(parameter)]
        if not any(math.isclose(rate, one, rel_tol=1e-6) for one in (of_group, *named)):
            found = f"built an optimizer whose lr is {rate:g} where its group says {of_group:g}"
            raise broken(plugin, found, "the groups as they are, or each group's options")
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]  # built ones evaluate
    return optimizer


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its weights differ for training and for all else, as those of schedule-free ones do (Defazio et al., 2024)."""
    return all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval"))
