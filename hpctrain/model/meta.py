"""Modules without memory: for a rank that will hold only a part, and for checking a job."""

from __future__ import annotations

import torch
from torch import nn

from hpctrain.base.errors import UsageError
from hpctrain.contracts.model import ModelSpec


def build_on_meta(spec: ModelSpec) -> nn.Module:
    """A new module on the meta device. Raises UsageError for sizes too large for torch."""
    try:
        with torch.device("meta"):
            return spec.build()
    except (RuntimeError, OverflowError) as error:
        raise UsageError(f"[model] {spec.name}: it cannot be built with these sizes: {error}") from error
