"""Accelerators and their figures."""

from __future__ import annotations

from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Annotated, Any

import tomli
from pydantic import BaseModel, ConfigDict, Field, field_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Machine(BaseModel):
    """The accelerators of a machine, as torch sees a device.

    memory: bytes. bandwidth: of the memory, bytes/s. flops: FLOP/s of products by data type. inside, across: bytes/s that a device
    sends to others of its node, and to other nodes while all of its node do. efficiency: the shares of FLOP/s and of bandwidths
    that programs reach. latency: seconds of a collective besides its bytes, for each node. launch: seconds of an operator at
    least. overhead: seconds of a step besides its operators. per_node: devices of a node. accelerator: whether they are none of
    its CPUs. device_names: patterns of the names that torch has for the device. measured: the figures that are.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory: Positive
    bandwidth: Positive
    flops: dict[str, Positive]
    inside: Positive
    across: Positive
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.7
    latency: Positive = 2e-5
    launch: Positive = 5e-6
    overhead: Positive = 2e-3
    per_node: Annotated[int, Field(ge=1)] = 8
    accelerator: bool = True
    device_names: list[str] = []
    measured: list[str] = []

    @field_validator("flops")
    @classmethod
    def _has_float32(cls, flops: dict[str, float]) -> dict[str, float]:
        if "float32" not in flops:
            raise ValueError("expected float32 among them, for what the table does not name")
        return flops

    def peak(self, dtype: str, tf32: bool) -> float:
        """FLOP/s of products of a data type; of one that the machine doesn't name, those of float32."""
        if dtype == "float32" and tf32 and "tf32" in self.flops:
            return self.flops["tf32"]
        if dtype.startswith("float8"):
            return next((rate for name, rate in self.flops.items() if name.startswith("float8")), self.flops["float32"])
        return self.flops.get(dtype) or self.flops["float32"]


def machine_of_device(name: str) -> Machine | None:
    """The shipped machine whose devices torch calls so; None for others, such as a slower variant of a card."""
    machines = (Machine.model_validate(table) for table in shipped_machines().values())
    return next((one for one in machines if any(fnmatchcase(name, pattern) for pattern in one.device_names)), None)


def shipped_machines() -> dict[str, Any]:
    """The tables of machines by their names."""
    return tomli.loads(files("hpctrain.job").joinpath("machines.toml").read_text())
