"""The initial values of a model of transformers, taken down while its own initialization runs on the meta device, and made anew for
any rows of a parameter: so each rank makes what it holds, and every layout starts with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import erf, sqrt
from typing import Any

import torch
from torch import Tensor
from transformers import initialization

from hpctrain.api import TorchDispatchMode, UsageError, fill_normal, is_mutable

_ATEN = torch.ops.aten
_DRAWS = {_ATEN.normal_.default: (0.0, 1.0), _ATEN.uniform_.default: (0.0, 1.0)}
"""The draws of initializations, with the defaults of their two numbers."""
_CONSTANTS = {_ATEN.fill_.Scalar, _ATEN.zero_.default}
_COPY = _ATEN.copy_.default
_BY_ELEMENT = {
    _ATEN.mul_.Tensor, _ATEN.mul_.Scalar, _ATEN.add_.Tensor, _ATEN.add_.Scalar, _ATEN.sub_.Tensor, _ATEN.sub_.Scalar,
    _ATEN.div_.Tensor, _ATEN.div_.Scalar, _ATEN.erfinv_.default, _ATEN.clamp_.default, _ATEN.exp_.default, _ATEN.log_.default,
    _ATEN.neg_.default, _ATEN.abs_.default, _ATEN.sqrt_.default, _ATEN.clamp_min_.default, _ATEN.clamp_max_.default,
}  # fmt: skip
"""Changes in place of each element by itself."""


@dataclass(frozen=True)
class Change:
    """A change of a parameter in place: func(parameter, *args, **keywords), or of one row of it."""

    func: Any
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]
    row: int | None = None
    is_known: bool = True
    """False for a change of a part that is no row: only a later change of everything makes the values known again."""

    @property
    def sets_all(self) -> bool:
        """Whether nothing is left of the values of before."""
        sets = self.func in _DRAWS or self.func in _CONSTANTS or self.func is _COPY
        return sets and self.row is None and self.is_known

    @property
    def can_be_repeated(self) -> bool:
        """Whether it needs no tensor that was made on the meta device and has no values."""
        given = (*self.args, *self.keywords.values())
        return self.is_known and not any(isinstance(one, Tensor) and one.is_meta for one in given)


@dataclass(frozen=True)
class _Alias:
    """A tensor that shares the memory of another one."""

    whole: Tensor
    row: int | None = None
    is_known: bool = True


class Recorder(TorchDispatchMode):
    """Takes down all changes of tensors on the meta device in its block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changes: dict[int, list[Change]] = {}
        self._aliases: dict[int, _Alias] = {}
        self._kept: list[Tensor] = []
        """Whatever was looked at: an id is a tensor's as long as it lives."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        out = func(*args, **given)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not first.is_meta:
            return out
        of = self._aliases.get(id(first), _Alias(first))
        if func.is_view:
            for one in out if isinstance(out, (list, tuple)) else (out,):
                self._kept.append(one)
                self._aliases[id(one)] = self._alias(of, func, args)
        elif is_mutable(func) and str(func).split(".")[1].endswith("_"):
            given.pop("generator", None)
            change = Change(func, tuple(args[1:]), given, of.row, of.is_known)
            self._kept.append(of.whole)
            if change.sets_all:
                self._changes[id(of.whole)] = [change]
            else:
                self._changes.setdefault(id(of.whole), []).append(change)
        return out

    @staticmethod
    def _alias(of: _Alias, func: Any, args: tuple[Any, ...]) -> _Alias:
        if func in (_ATEN.detach.default, _ATEN.alias.default):
            return of
        is_row = func is _ATEN.select.int and args[1] == 0 and of.row is None and of.is_known
        return _Alias(of.whole, int(args[2])) if is_row else _Alias(of.whole, None, is_known=False)

    def of(self, tensor: Tensor) -> list[Change]:
        """The changes that make the values of `tensor`; empty if nothing has."""
        return self._changes.get(id(tensor), [])


@contextmanager
def told_on_meta() -> Iterator[None]:
    """Let the initializations that torch leaves out on the meta device do there what they do elsewhere."""
    functions = initialization.TORCH_INIT_FUNCTIONS
    before = dict(functions)
    functions["trunc_normal_"] = _truncated
    functions |= dict.fromkeys(("orthogonal_", "sparse_", "dirac_", "eye_"), _unknown)
    try:
        yield
    finally:
        functions |= before


def _truncated(
    tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0, generator: object = None
) -> Tensor:
    """Normal numbers between a and b, by the inverse of their distribution."""
    low, high = (erf((bound - mean) / (std * sqrt(2))) for bound in (a, b))
    with torch.no_grad():
        return tensor.uniform_(low, high).erfinv_().mul_(std * sqrt(2)).add_(mean).clamp_(min=a, max=b)


def _unknown(tensor: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """Values that only a whole matrix has: a copy of one without values."""
    with torch.no_grad():
        return tensor.copy_(torch.empty_like(tensor))


@dataclass(frozen=True)
class Recipe:
    """The way to make the initial values of a parameter or buffer. shape: of all of it."""

    shape: tuple[int, ...]
    changes: Sequence[Change]

    def refuse_unknown(self, name: str) -> None:
        """Raises UsageError where only transformers' own code could make the values."""
        if not self.changes or not self.changes[0].sets_all or not all(one.can_be_repeated for one in self.changes):
            raise UsageError(
                f"[model] huggingface: {name} has no value: neither the weights at `path` have it, nor does the model's own "
                "initialization set it in a way that can be repeated by rows"
            )

    def fill(self, name: str, tensor: Tensor, rows: tuple[int, int], seed: int) -> None:
        """Fill `tensor`, the rows `rows` of `name`."""
        self.refuse_unknown(name)
        if all(change.func in _BY_ELEMENT for change in self.changes[1:] if change.row is None):
            values = self._made(tensor.shape, rows, name, seed)
        else:
            values = self._made(self.shape, (0, self.shape[0] if self.shape else 1), name, seed)
            values = values[rows[0] : rows[1]] if self.shape else values
        tensor.copy_(values)

    def _made(self, shape: Sequence[int], rows: tuple[int, int], name: str, seed: int) -> Tensor:
        """The values of some rows."""
        first, *others = self.changes
        values = self._begun(first, shape, rows, name, seed)
        for change in others:
            part: Tensor | None = values
            if change.row is not None:
                row = change.row % self.shape[0]
                part = values[row - rows[0]] if rows[0] <= row < rows[1] else None
            if part is not None:
                change.func(part, *change.args, **change.keywords)
        return values

    def _begun(self, change: Change, shape: Sequence[int], rows: tuple[int, int], name: str, seed: int) -> Tensor:
        if change.func is _COPY:
            source: Tensor = change.args[0].detach().expand(self.shape)
            return source[rows[0] : rows[1]].clone() if self.shape else source.clone()
        values = torch.empty(tuple(shape), dtype=torch.float32)
        if change.func in _CONSTANTS:
            change.func(values, *change.args)
            return values
        names = ("mean", "std") if change.func is _ATEN.normal_.default else ("from", "to")
        low, high = _numbers(change, names)
        fill_normal(values, 1.0, seed, name, rows)
        if names[0] == "mean":
            return values.mul_(high).add_(low)
        quantile: Tensor = torch.special.ndtr(values)  # of a normal number: it is uniform
        return quantile.mul_(high - low).add_(low)


def _numbers(change: Change, names: Sequence[str]) -> tuple[float, float]:
    """The two numbers of a draw."""
    given = dict(zip(names, _DRAWS[change.func], strict=True)) | dict(zip(names, change.args, strict=False))
    given |= {key: value for key, value in change.keywords.items() if key in given}
    first, second = (float(given[name]) for name in names)
    return first, second
