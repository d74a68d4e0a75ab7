"""The settings of the stages of ZeRO that would save memory."""

from __future__ import annotations

import torch

from hpctrain.api import Sharding


def memory_advice(stage: Sharding, ranks: int, device: torch.device) -> list[str]:
    """Advise a stage with more sharding, and what can be offloaded. stage: "zero-0" to "zero-3", whose method this is."""
    from hpctrain.toolkit.offload import is_needed  # here: asked where memory has ended

    found = stage.name.removeprefix("zero-")
    sharded = [f"[sharding] stage = 3, found {found}"] if found != "3" and ranks > 1 else []
    keys = ("offload_optimizer", "offload_parameters")
    return sharded + [
        f"[sharding] {key} = true" for key in keys if is_needed(getattr(stage.options, key, None) is False, device)
    ]
