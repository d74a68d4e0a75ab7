"""What every plugin has: a name, options with types and help, and nothing else."""

from __future__ import annotations

import re
from abc import ABC
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Options(BaseModel):
    """The keys of a plugin's table in the job file: a pydantic model that refuses what it does not know.

    Give each field a type, a default where one makes sense, limits, and a `description` in `Field`: the job
    check, `hpctrain plugins show` and the JSON schema are made from them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Plugin(ABC):
    """Base of the classes that the registration hooks return; each slot has its own subclass of it."""

    name: ClassVar[str]
    """What the job file calls it."""

    Options: ClassVar[type[Options]] = Options
    """The keys that its table may hold."""

    def __init__(self, options: Any) -> None:
        """Keep the validated options (an instance of `Options`); must not communicate or build anything large."""
        self.options = options


def parse_bytes(value: object) -> object:
    """Turn "500MB" or "64KiB" into bytes; whatever is no such text goes on to the type check unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError('expected a size in bytes such as 500000000, "500MB" or "64KiB"')
    size = float(match[1]) * _UNITS[match[2].upper()]
    if size >= 2**63:
        raise ValueError("expected a size in bytes below 2**63")
    return round(size)


ByteSize = Annotated[int, BeforeValidator(parse_bytes, json_schema_input_type=int | str)]
"""A size in bytes: an integer, or text with a unit (KB, MB, GB decimal; KiB, MiB, GiB binary)."""
