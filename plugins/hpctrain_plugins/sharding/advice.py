"""The settings of the stages of ZeRO that would save memory."""

from __future__ import annotations

import torch

from hpctrain.api import Options


def memory_advice(name: str, options: Options, ranks: int, device: torch.device) -> list[str]:
    """Advise a stage with more sharding, and what can be offloaded. name: "zero-0" to "zero-3"."""
    from hpctrain.toolkit.offload import is_needed  # here: asked where memory has ended

    sharded = [f"[sharding] stage = 3, found {name.removeprefix('zero-')}"] if name != "zero-3" and ranks > 1 else []
    keys = ("offload_optimizer", "offload_parameters")
    return sharded + [
        f"[sharding] {key} = true" for key in keys if is_needed(getattr(options, key, None) is False, device)
    ]
