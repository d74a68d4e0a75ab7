"""What options of several optimizers have in common."""

from __future__ import annotations

from typing import Annotated

from hpctrain.api import Field

Decay = Annotated[float, Field(ge=0, lt=1)]
"""How much of a running mean is kept in a step."""
