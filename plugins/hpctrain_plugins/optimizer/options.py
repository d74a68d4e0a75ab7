"""Common types of optimizer options."""

from __future__ import annotations

from typing import Annotated

from hpctrain.api import Field

Decay = Annotated[float, Field(ge=0, lt=1)]
"""The fraction of a running mean that is kept per step."""
