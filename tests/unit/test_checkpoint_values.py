"""The small values: what JSON lacks comes back, and what would come back different is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.api import CheckpointError
from hpctrain.toolkit.checkpoint import values

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


@given(TREES)
def test_everything_that_is_taken_comes_back_equal_and_of_the_same_type(tree: Any) -> None:
    text = json.dumps(values.encode(tree), allow_nan=False)
    back = values.decode(json.loads(text))
    assert repr(back) == repr(tree)


def test_not_a_number_comes_back() -> None:
    assert math.isnan(values.decode(values.encode({"loss": math.nan}))["loss"])


@pytest.mark.parametrize("leaf", [torch.ones(2), {1, 2}, object(), 1j])
def test_anything_else_is_a_type_error_that_names_the_key(leaf: Any) -> None:
    with pytest.raises(TypeError, match=r"values\.scaler\[1\]\.x is a "):
        values.encode({"scaler": [0, {"x": leaf}]})


@pytest.mark.parametrize(
    "crafted", [{"$float": "x"}, {"$bytes": "%"}, {"$new": 1}, {"$dict": [1]}, {"$dict": [[[], 1]]}]
)
def test_malformed_tags_are_refused(crafted: Any) -> None:
    with pytest.raises(CheckpointError, match="malformed"):
        values.decode(crafted)


def test_what_is_nested_too_deep_to_be_read_is_not_written() -> None:
    deep: Any = []
    deep.append(deep)
    with pytest.raises(TypeError, match=r"values.x\[0\].* is nested more than 64 deep"):
        values.encode({"x": deep})
