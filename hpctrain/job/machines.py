"""The figures of accelerators, as machines.toml has them; `hpctrain plan` says what each means."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any

import tomli


def shipped_machines() -> dict[str, Any]:
    """The tables of machines by their names."""
    return tomli.loads(files("hpctrain.job").joinpath("machines.toml").read_text())


def machine_of_device(name: str) -> dict[str, Any] | None:
    """The machine whose devices torch calls so; None for others, such as a slower variant of a card."""
    tables = shipped_machines().values()
    return next(
        (table for table in tables if any(fnmatchcase(name, one) for one in table.get("device_names", ()))), None
    )


def peak_flops_of(flops: Mapping[str, float], dtype: str, tf32: bool) -> float:
    """FLOP/s of products of a data type, by a machine's `flops`; of one that these don't name, those of float32."""
    if dtype == "float32" and tf32 and "tf32" in flops:
        return flops["tf32"]
    if dtype.startswith("float8"):
        return next((rate for name, rate in flops.items() if name.startswith("float8")), flops["float32"])
    return flops.get(dtype) or flops["float32"]
