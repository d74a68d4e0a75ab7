"""`powersgd`: sends each matrix as two narrow factors.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019. Let
M be a rank's gradient plus its residual, (rows, columns), and Q the factor of the previous step, (columns, rank). Then
P = orthonormal(sum of M Q) and Q = sum of M^T P. The sum of M becomes P Q^T, and the rank's residual is M - P P^T M.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.api import (
    Compression,
    CompressionOptions,
    Compressor,
    Field,
    GradientBucket,
    LossyCompression,
    Piece,
    Plan,
    Problem,
    Residual,
    Span,
    hookimpl,
)


class PowerSGDOptions(CompressionOptions):
    rank: int = Field(default=16, ge=1, description="columns of the narrow factors: more are closer to the gradient")


class PowerSGD(LossyCompression):
    """Send each matrix as a product of two narrow factors (one power iteration per step); error feedback."""

    name = "powersgd"
    Options = PowerSGDOptions
    options: PowerSGDOptions

    def problems(self, plan: Plan) -> list[Problem]:
        if not plan.sharding.tells_spans:
            why = f"sharding {plan.sharding.name} does not say which matrices are in a bucket"
            return [Problem(f'{why}; use stage = 2 or less, or name = "bf16"')]
        axes = plan.model_axes or {}
        if sum(axes.get(axis, 1) > 1 for axis in plan.data_axes) > 1:
            why = "hybrid sharding sums slices of parameters over the replicas, and slices are not matrices"
            return [Problem(f'{why}; use stage = 0, replicate = 1 or name = "top-k"')]
        return []

    def compressor(self, bucket: GradientBucket, group: dist.ProcessGroup) -> Compressor:
        return PowerSGDCompressor(bucket, group, self.options.rank)


@dataclass
class Matrix:
    """A gradient of two or more dims as a matrix, (rows, columns): the first dim, and all others."""

    span: Span
    rows: int
    columns: int
    factor: Tensor
    """Q: (columns, rank)."""
    drawn: Tensor
    """The first factor."""

    @staticmethod
    def of(span: Span, rank: int, like: Tensor) -> Matrix | None:
        """The matrix of a gradient; None if the two factors would not be smaller."""
        shape = span.piece.tensor.shape
        rows, columns = (shape[0], prod(shape[1:])) if len(shape) > 1 else (1, span.numel)
        if (rows + columns) * rank >= rows * columns:
            return None
        drawn = _drawn(span.piece.name, columns, rank).to(like)
        return Matrix(span, rows, columns, drawn.clone(), drawn)

    def view(self, flat: Tensor) -> Tensor:
        """(rows, columns)"""
        return self.span.view(flat).view(self.rows, self.columns)

    def follow(self, factor: Tensor) -> None:
        """Start the next step with these columns, normalized. A zero column would stay zero, so it is drawn again."""
        lengths = factor.norm(dim=0)
        self.factor.copy_(torch.where(lengths == 0, self.drawn, factor / lengths))

    @property
    def name(self) -> str:
        """The factor's name in a checkpoint. It includes the place of a rectangle, and only the tensor's name if uncut."""
        piece = self.span.piece
        place = "" if piece.tensor.shape == piece.shape else "-".join(map(str, piece.offsets)) + "/"
        return f"factor/{place}{piece.name}"


class PowerSGDCompressor(Compressor):
    """Sends all P and the gradients that are not matrices in one all-reduce, then all Q."""

    def __init__(self, bucket: GradientBucket, group: dist.ProcessGroup, rank: int) -> None:
        super().__init__(bucket, group)
        self._residual = Residual(bucket, group)
        found = [(span, Matrix.of(span, rank, self._residual.flat)) for span in bucket.spans]
        self._matrices = [matrix for _, matrix in found if matrix is not None]
        self._whole = [span for span, matrix in found if matrix is None]

    def all_reduce(self, gradients: Tensor, scale: float) -> None:
        self._residual.add_to(gradients, scale)
        matrices = [matrix.view(gradients) for matrix in self._matrices]
        whole = [span.view(gradients) for span in self._whole]
        products = [values @ one.factor for one, values in zip(self._matrices, matrices, strict=True)]
        sums = self._sum([*products, *whole])
        for values, total in zip(whole, sums[len(products) :], strict=True):
            values.copy_(total)
        bases = [_orthonormal(total) for total in sums[: len(products)]]
        mine = [values.T @ basis for values, basis in zip(matrices, bases, strict=True)]
        self._keep(gradients, bases, mine, scale)
        for matrix, values, basis, factor in zip(self._matrices, matrices, bases, self._sum(mine), strict=True):
            torch.mm(basis, factor.T, out=values)
            matrix.follow(factor)

    def _keep(self, gradients: Tensor, bases: list[Tensor], mine: list[Tensor], scale: float) -> None:
        """Keep the part of this rank's matrices outside of the bases. Clear the residual of other gradients, which a
        checkpoint may have set."""
        for span in self._whole:
            span.view(self._residual.flat).zero_()
        for matrix, basis, factor in zip(self._matrices, bases, mine, strict=True):
            matrix.view(self._residual.flat).copy_(matrix.view(gradients)).addmm_(basis, factor.T, alpha=-1)
        self._residual.unscale(scale)

    def _sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """The sum of each tensor over the ranks."""
        if not tensors:
            return []
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat, group=self.group)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def state(self) -> list[Tensor]:
        return [self._residual.flat, *(matrix.factor for matrix in self._matrices)]

    def consolidate(self) -> None:
        self._residual.consolidate()

    def pieces(self) -> list[Piece]:
        return [*self._residual.pieces(), *(Piece.whole(one.name, one.factor) for one in self._matrices)]


def _orthonormal(columns: Tensor) -> Tensor:
    """Orthonormal columns with the same span."""
    basis: Tensor = torch.linalg.qr(columns).Q
    return basis


def _drawn(name: str, rows: int, columns: int) -> Tensor:
    """Random columns, equal on all ranks."""
    return torch.randn(
        rows, columns, dtype=torch.float32, generator=torch.Generator().manual_seed(crc32(name.encode()))
    )


@hookimpl
def hpctrain_compression() -> list[type[Compression]]:
    return [PowerSGD]
