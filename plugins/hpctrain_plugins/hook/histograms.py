"""Histograms of weights and gradients, over the full parameters of every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.api import Field, Hook, LiveModel, Options, Piece, hookimpl

Kind = Literal["weights", "gradients"]


class HistogramsOptions(Options):
    every_steps: int = Field(default=100, ge=1, description="steps between histograms")
    bins: int = Field(default=64, ge=1, le=10_000, description="intervals between the smallest and the largest value")
    of: list[Kind] = Field(default=["weights", "gradients"], min_length=1, description="what is counted")


class Histograms(Hook):
    """Adds a histogram of each trained parameter, and of its gradient, to the rows of metrics."""

    name = "histograms"
    Options = HistogramsOptions
    options: HistogramsOptions

    def start(self) -> _Counting:
        return _Counting(self.options)


class _Counting:
    def __init__(self, options: HistogramsOptions) -> None:
        self._options = options

    @hookimpl
    def hpctrain_step_end(self, step: int, metrics: dict[str, Any], model: LiveModel) -> None:
        if step % self._options.every_steps == 0:
            of: dict[str, Callable[[Piece], Tensor | None]] = {
                "weights": lambda piece: piece.tensor.detach(),
                "gradients": lambda piece: piece.tensor.grad,
            }
            shapes = {name: numel for name, shape in model.shapes.items() if (numel := torch.Size(shape).numel())}
            found = {kind: histograms(shapes, model.pieces, of[kind], self._options.bins) for kind in self._options.of}
            metrics["histograms"] = found


def histograms(
    elements: dict[str, int], pieces: Sequence[Piece], values_of: Callable[[Piece], Tensor | None], bins: int
) -> dict[str, dict[str, Any]]:
    """The `low`, `high`, `mean`, `std` and `counts` of each parameter's finite elements. Collective.

    elements: the number of elements of each parameter of the full model.
    """
    row = {name: number for number, name in enumerate(elements)}
    found = [(row[piece.name], _finite(values_of(piece))) for piece in pieces]
    ends = torch.full((2, len(row)), -torch.inf, dtype=torch.float64)  # -low, high
    for number, values in found:
        if len(values):
            mine = torch.stack([-values.min(), values.max()])
            ends[:, number] = torch.maximum(ends[:, number], mine.cpu())
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    low, high = -ends[0], ends[1]
    sums = torch.zeros(
        len(row), bins + 3, dtype=torch.float64
    )  # counts, then elements, their sum and the sum of squares
    for number, values in found:
        if not len(values):
            continue
        counts = torch.histc(values, bins, *_interval(low[number].item(), high[number].item()))
        rest = torch.stack([values.new_tensor(float(len(values))), values.sum(), values.square().sum()])
        sums[number] += torch.cat([counts, rest]).cpu()
    here = torch.zeros(len(row), dtype=torch.float64)
    for piece in pieces:
        here[row[piece.name]] += piece.tensor.numel()
    dist.all_reduce(sums)
    dist.all_reduce(here)
    # each element is counted by as many ranks as have a replica of it
    sums /= (here / torch.tensor(list(elements.values()), dtype=torch.float64))[:, None]
    return {name: _described(low[n].item(), high[n].item(), sums[n].tolist()) for name, n in row.items()}


def _finite(values: Tensor | None) -> Tensor:
    """The finite elements in float64; of complex numbers the absolute values."""
    assert values is not None  # after a step, each piece has a gradient
    flat = (values.abs() if values.is_complex() else values).double().reshape(-1)
    return flat[flat.isfinite()]


def _interval(low: float, high: float) -> tuple[float, float]:
    """torch.histc takes the values' own range where both ends are equal."""
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _described(low: float, high: float, sums: list[float]) -> dict[str, Any]:
    *counts, count, total, squares = sums
    if not count:
        return {"low": 0.0, "high": 0.0, "mean": 0.0, "std": 0.0, "counts": [0 for _ in counts]}
    mean = total / count
    low, high = _interval(low, high)
    deviation = max(0.0, squares / count - mean * mean) ** 0.5
    return {"low": low, "high": high, "mean": mean, "std": deviation, "counts": [round(one) for one in counts]}


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [Histograms]
