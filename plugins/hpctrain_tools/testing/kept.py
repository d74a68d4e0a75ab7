"""Tensors and small values of many types that the recorder keeps in checkpoints, to see whether a format restores them."""

from __future__ import annotations

import math
from typing import Any

import torch

from hpctrain.api import Piece, PluginState

_VALUES: dict[str, Any] = {
    "none": None, "flag": True, "count": 2**62, "share": 0.1, "endless": math.inf, "text": "ä\n", "bytes": b"\x00\xff",
    "list": [1, 2.5], "pair": (1, (2,)), "by number": {3: "three", -1: [None]},
}  # fmt: skip
"""Small values of the types that `hpctrain.api.encode_value` knows."""


class Kept:
    """Tensors of several dtypes and shapes, on all ranks or by rows of each, and small values."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        wide = torch.randn(7, 3, dtype=torch.float64, generator=draw)
        self._wanted = {
            "float64": wide, "float32": wide.float(), "bfloat16": wide.bfloat16(), "int64": (wide * 2**40).long(),
            "bool": wide > 0, "uint8": (wide.abs() * 50).byte(), "alone": wide[0, 0].clone(), "empty": wide[:0].clone(),
        }  # fmt: skip
        self._live = {name: torch.zeros_like(tensor) for name, tensor in self._wanted.items()}
        self._wanted["columns"], self._live["columns"] = wide, torch.zeros(3, 7, dtype=wide.dtype).t()  # of any stride
        self._rows, self._restored = slice(0, 0), dict[str, Any]()

    def state(self, rank: int, ranks: int) -> PluginState:
        """The state of a rank, with zeros: the tensors, whole on each, and the rows of one that are its own."""
        first, end = (7 * one // ranks for one in (rank, rank + 1))
        self._rows = slice(first, end)
        rows = Piece("kit/rows", (7, 3), (first, 0), self._live["float64"][self._rows].clone())
        self._live["rows"], self._wanted["rows"] = rows.tensor, self._wanted["float64"][self._rows]
        others = [Piece.whole(f"kit/{name}", tensor) for name, tensor in self._live.items() if name != "rows"]
        return PluginState("kit", [rows, *others], values=lambda: dict(_VALUES), restore=self._restored.update)

    def fill(self) -> None:
        """A new run: give the tensors their values."""
        for name, tensor in self._live.items():
            tensor.copy_(self._wanted[name])

    def wrong(self) -> list[str]:
        """Clauses about what a resume has not brought back."""
        tensors = [name for name, tensor in self._live.items() if not torch.equal(tensor, self._wanted[name])]
        values = [key for key, value in _VALUES.items() if not _same(self._restored.get(key), value)]
        return [
            *(f"a tensor of {self._wanted[name].dtype}, {name!r}, with other values" for name in tensors),
            *(f"{self._restored.get(key)!r} in place of {_VALUES[key]!r}" for key in values),
        ]


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
