"""The types of [environment]. Apart from environment.py, which must not take the time of importing pydantic."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from hpctrain.job.environment import PREFIXES, as_text, name_problem, text_problem


def _variable(name: str) -> str:
    problem = name_problem(name)
    if problem is not None:
        raise ValueError(problem)
    return name


def _value(text: str) -> str:
    problem = text_problem(text)
    if problem is not None:
        raise ValueError(problem)
    return text


Variable = Annotated[
    str, AfterValidator(_variable), WithJsonSchema({"type": "string", "pattern": f"^({'|'.join(PREFIXES)})"})
]
Value = Annotated[str, BeforeValidator(as_text, json_schema_input_type=str | int), AfterValidator(_value)]
