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
    """The machine whose devices have this name in torch; None for others, such as a slower variant of a card."""
    machines = shipped_machines().values()
    names = [(pattern, machine) for machine in machines for pattern in machine.get("device_names", ())]
    return next((machine for pattern, machine in names if fnmatchcase(name, pattern)), None)


def peak_flops_of(flops: Mapping[str, float], dtype: str, tf32: bool) -> float:
    """FLOP/s of products of a data type, from a machine's `flops`; float32's for a type that these lack."""
    if dtype == "float32" and tf32 and "tf32" in flops:
        return flops["tf32"]
    if dtype.startswith("float8"):  # all variants are equally fast
        return next((rate for name, rate in flops.items() if name.startswith("float8")), flops["float32"])
    return flops.get(dtype) or flops["float32"]
