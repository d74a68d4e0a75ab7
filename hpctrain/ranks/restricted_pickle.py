"""The pickles that torch's own code may send between ranks: DCP's plans and pipelines' shapes. None can run code.

hpctrain itself sends JSON (hpctrain.ranks.json_collectives).
"""

from __future__ import annotations

import builtins
import collections
import dataclasses
import enum
import importlib
import pickle
import traceback
from typing import Any

import torch

from hpctrain.base import errors
from hpctrain.base.torch_private import get_layout, set_object_unpickler


def _member(kind: Any, name: str) -> Any:
    """A member of an enum, as Python 3.11.0 to 3.11.3 write it."""
    if isinstance(kind, enum.EnumMeta):
        return kind[name]
    raise TypeError(
        f"a rank sent an attribute of {type(kind).__name__}, which could run code here; expected a member of an enum"
    )


_TORCH_MODULES = ("torch.distributed.checkpoint.", "torch.distributed.pipelining.")
_PLAIN: dict[tuple[str, str], Any] = {
    **{("builtins", kind.__name__): kind for kind in (set, frozenset, slice, range, complex, bytearray)},
    **{("collections", kind.__name__): kind for kind in (collections.OrderedDict, collections.deque)},
    **{("traceback", kind.__name__): kind for kind in (traceback.StackSummary, traceback.FrameSummary)},
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    (get_layout.__module__, get_layout.__name__): get_layout,
    ("builtins", "getattr"): _member,
}


class ObjectUnpickler(pickle.Unpickler):
    """Unpickles records, enums, exceptions and torch's constants; TypeError for everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        found = None
        if module in ("builtins", errors.__name__, "torch") or module.startswith(_TORCH_MODULES):
            found = getattr(builtins if module == "builtins" else importlib.import_module(module), name, None)
        if _is_record(found) or (
            module == "torch" and isinstance(found, torch.dtype | torch.layout | torch.memory_format)
        ):
            return found
        raise TypeError(
            f"a rank sent an object of {module}.{name}, which could run code here; expected values and torch's own records: "
            "send others with hpctrain.api.gather_values or broadcast_value"
        )


def restrict_objects() -> None:
    """Let torch's object collectives accept only what `ObjectUnpickler` does, until `allow_objects`."""
    set_object_unpickler(ObjectUnpickler)


def allow_objects() -> None:
    """The job is over: the program may use torch.distributed without restriction again."""
    set_object_unpickler(pickle.Unpickler)


def _is_record(found: Any) -> bool:
    return isinstance(found, type) and (
        dataclasses.is_dataclass(found)
        or issubclass(found, (enum.Enum, BaseException))
        or (issubclass(found, tuple) and hasattr(found, "_fields"))
    )
