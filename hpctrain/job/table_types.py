"""The kinds of tables of a job file, and the types of their values: times, variables, keys that exclude each other."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from hpctrain.job.environment import PREFIXES, as_text, name_problem, text_problem

_FORMS = (
    r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m)?(?:(?P<s>\d+)s)?",
    r"(?P<m>\d+)(?::(?P<s>[0-5]\d))?",  # this and the next two are Slurm's
    r"(?P<h>\d+):(?P<m>[0-5]\d):(?P<s>[0-5]\d)",
    r"(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>[0-5]\d)(?::(?P<s>[0-5]\d))?)?",
)
_IN_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
OF_SEVERAL_KEYS = "several_keys"
"""The kind of an error whose sentence already says what was found."""


def seconds_of(time: str) -> int:
    """ "90m" -> 5400, "1-00:00:00" -> 86400, "10" -> 600. Raises ValueError."""
    match = next((match for form in _FORMS if (match := re.fullmatch(form, time))), None)
    seconds = 0 if match is None else sum(int(n or 0) * _IN_SECONDS[unit] for unit, n in match.groupdict().items())
    if not 0 < seconds < 2**31:  # "" matches the first form, and is 0
        raise ValueError('expected a time such as "24h", "1h30m", "90m", or as in Slurm "90" (minutes) or "1-12:00:00"')
    return seconds


def _duration(text: str) -> str:
    seconds_of(text)
    return text


def of_file_system(name: str) -> str:
    """The name of a file or directory. Raises ValueError for one that the locale can't write."""
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        raise ValueError(f"expected a name in the locale's encoding, {encoding}; LC_ALL=C.UTF-8 allows any") from None
    return name


def error_of_several_keys(sentence: str) -> PydanticCustomError:
    """The error of a validator about keys that don't go together; the sentence says what was found."""
    # a template, since pydantic would fill braces in the sentence itself
    return PydanticCustomError(OF_SEVERAL_KEYS, "{sentence}", {"sentence": sentence})


Duration = Annotated[str, AfterValidator(_duration)]
_as_seconds = BeforeValidator(lambda one: seconds_of(one) if isinstance(one, str) else one, float | str)
Seconds = Annotated[float, _as_seconds, Field(gt=0, le=1e8)]


class Table(BaseModel):
    """A table with fixed keys."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class SlotTable(Table):
    """A table that chooses a plugin, which takes the keys that are not declared here."""

    model_config = ConfigDict(extra="allow")

    @property
    def options(self) -> dict[str, Any]:
        """The plugin's keys as in the file."""
        return dict(self.model_extra or {})


def _refusing(problem_of: Callable[[str], str | None]) -> AfterValidator:
    def refuse(text: str) -> str:
        problem = problem_of(text)
        if problem is not None:
            raise ValueError(problem)
        return text

    return AfterValidator(refuse)


Variable = Annotated[
    str, _refusing(name_problem), WithJsonSchema({"type": "string", "pattern": f"^({'|'.join(PREFIXES)})"})
]
VariableValue = Annotated[str, BeforeValidator(as_text, json_schema_input_type=str | int), _refusing(text_problem)]


def table_of(key: str, value: object) -> object:
    """The table for which an integer, the value of `key`, is short; any other value as it is."""
    return {key: value} if isinstance(value, int) and not isinstance(value, bool) else value  # True is an int
