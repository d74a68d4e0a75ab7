"""An entry of a tensor-parallel plan: a style, and the parts of a fused matrix."""

from __future__ import annotations

from itertools import accumulate
from typing import Annotated

import torch
from pydantic import BeforeValidator, model_validator
from torch import nn

from hpctrain.api import Field, Options, UsageError, set_row_order


class Cut(Options):
    style: str = Field(
        description="the style: colwise, rowwise, colwise_rep, rowwise_rep, vocabulary, gather, norm, head_norm or positions"
    )
    parts: int | list[int] | None = Field(
        default=None,
        description="for a fused matrix with colwise, such as [q; k; v]: the number of equal parts, or the rows of each part",
    )

    @model_validator(mode="after")
    def _parts_are_rows(self) -> Cut:
        parts = self.parts if isinstance(self.parts, list) else [1 if self.parts is None else self.parts]
        if not parts or min(parts) < 1:
            raise ValueError("expected parts of at least 1")
        if self.parts is not None and self.style != "colwise":
            raise ValueError(f'parts go with style = "colwise", whose rows are cut; found style = "{self.style}"')
        return self

    def rows(self, name: str, linear: nn.Linear) -> list[int]:
        """The rows of each part of `linear`. Raises UsageError if the parts do not make up the matrix."""
        whole = linear.weight.shape[0]
        if isinstance(self.parts, list):
            if sum(self.parts) != whole:
                raise UsageError(
                    f"[parallelism.tensor] plan: {name}.weight has {whole} rows, and parts = {self.parts} are "
                    f"{sum(self.parts)}; expected the rows of each part"
                )
            return self.parts
        count = self.parts or 1
        if whole % count:
            raise UsageError(
                f"[parallelism.tensor] plan: {name}.weight has {whole} rows, which parts = {count} do not divide; "
                "where parts differ write their rows, such as parts = [64, 16, 16]"
            )
        return [whole // count] * count


StyleOrCut = Annotated[
    Cut, BeforeValidator(lambda v: {"style": v} if isinstance(v, str) else v, json_schema_input_type=str | Cut)
]
"""A plain style stands for a table with that style."""


def linear_of(module: nn.Module, name: str) -> nn.Linear:
    """The Linear of that name in `module`."""
    found = module.get_submodule(name)
    assert isinstance(found, nn.Linear)
    return found


def row_runs(parts: list[int], ranks: int) -> list[list[tuple[int, int]]]:
    """The share of every part that each rank has: first row, number of rows."""
    begins = [0, *accumulate(parts)]
    shares = [(begin, rows // ranks) for begin, rows in zip(begins, parts, strict=False)]
    return [[(begin + rank * share, share) for begin, share in shares] for rank in range(ranks)]


def gather_shares(linear: nn.Module, parts: list[int], ranks: int) -> None:
    """Reorder the rows by rank, so that a plain cut of dim 0 gives each rank its shares."""
    runs = [run for of_rank in row_runs(parts, ranks) for run in of_rank]
    for name, parameter in linear.named_parameters(recurse=False):
        parameter.data = torch.cat([parameter.data[first : first + count] for first, count in runs])
        set_row_order(linear, name, runs)
