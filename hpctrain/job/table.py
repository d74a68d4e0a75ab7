"""The two kinds of tables of a job file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from hpctrain.job.times import seconds_or_number

OF_SEVERAL_KEYS = "several_keys"
"""The kind of an error that says itself what was found."""


def error_of_several_keys(sentence: str) -> PydanticCustomError:
    """The error of a validator about keys that don't go together; the sentence says what was found."""
    return PydanticCustomError(OF_SEVERAL_KEYS, "{sentence}", {"sentence": sentence})


Seconds = Annotated[float, BeforeValidator(seconds_or_number, json_schema_input_type=float | str), Field(gt=0, le=1e8)]


class Table(BaseModel):
    """A table with fixed keys."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class SlotTable(Table):
    """A table that chooses a plugin; undeclared keys go to the plugin."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's keys as in the file."""
        return dict(self.model_extra or {})
