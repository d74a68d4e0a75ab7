"""The machine that a plan is for, by its name or from a file, and the sources of its figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hpctrain.base.errors import UsageError, reason
from hpctrain.job.machines import peak_flops_of, shipped_machines
from hpctrain.job.toml import parse

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
        return peak_flops_of(self.flops, dtype, tf32)


def open_machine(name: str) -> Machine:
    """A shipped machine by its name, or the table [machine] of a TOML file. Raises UsageError."""
    tables = shipped_machines()
    if name.lower() in tables:
        return Machine.model_validate(tables[name.lower()])
    path = Path(name)
    try:
        table = parse(path.read_text())["machine"]
    except (OSError, ValueError, KeyError) as error:
        why = "it has no table [machine]" if isinstance(error, KeyError) else reason(error)
        raise UsageError(
            f"--machine {name}: expected one of {', '.join(tables)}, or a TOML file with a table [machine]: {why}"
        ) from None
    try:
        return Machine.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join(["[machine]", ".".join(map(str, first["loc"]))]).strip()
        raise UsageError(f"{path}: {where}: {first['msg']}, found {first['input']!r}") from None


def figure_sources(machine: Machine) -> Iterator[str]:
    """Sentences about the figures that a time depends on: which were measured, given, or guessed."""
    kinds: dict[str, list[str]] = {"measured": [], "from data sheets": [], "guessed": []}
    for name in ("flops", "bandwidth", "inside", "across", "efficiency", "latency", "launch", "overhead"):
        given = "from data sheets" if name in machine.model_fields_set and not machine.measured else "guessed"
        kinds["measured" if name in machine.measured else given].append(name)
    yield from (f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names)
