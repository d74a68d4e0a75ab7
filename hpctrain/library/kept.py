"""Objects of a program in its checkpoints."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hpctrain.base.errors import UsageError
from hpctrain.contracts.life_cycle import PluginState
from hpctrain.contracts.pieces import Piece


def kept_state(name: str, one: Any) -> PluginState:
    """The state of an object with `state_dict` and `load_state_dict`: tensors as pieces, all else as JSON values.

    Raises UsageError for an object without them. The tensors' names and shapes have to stay as they are now.
    """
    if not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
        raise UsageError(
            f"register_for_checkpointing: {name!r} is of type {type(one).__name__}, expected state_dict and load_state_dict"
        )
    tensors = {key: value.detach().clone() for key, value in one.state_dict().items() if isinstance(value, Tensor)}

    def values() -> dict[str, Any]:
        found = one.state_dict()
        for key, tensor in tensors.items():
            tensor.copy_(found[key])
        return {"values": {key: value for key, value in found.items() if key not in tensors}}

    def restore(read: dict[str, Any]) -> None:
        one.load_state_dict({**read["values"], **{key: tensor.clone() for key, tensor in tensors.items()}})

    return PluginState(name, [Piece.whole(key, tensor) for key, tensor in tensors.items()], values, restore)
