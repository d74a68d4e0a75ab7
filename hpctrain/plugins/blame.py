"""Finds the plugin whose code raised an error, and the layer of the model."""

from __future__ import annotations

import logging
import os
import traceback
from dataclasses import replace
from types import TracebackType

from torch import Tensor

from hpctrain.base.errors import HpctrainError, TrainingError
from hpctrain.base.torch_private import MODULE_CALL
from hpctrain.contracts.identity import Identity
from hpctrain.mpi.errors import CommunicationError
from hpctrain.plugins.entry_points import ModuleSource
from hpctrain.plugins.registry import Registry

LOG = logging.getLogger("hpctrain")

_COMMUNICATION = (os.path.join("torch", "distributed"), os.path.join("hpctrain", "mpi"))


def is_communication(trace: TracebackType | None) -> bool:
    """Whether communication raised the error, so that the cause may be another rank."""
    last = traceback.extract_tb(trace)[-3:]
    return any(part in frame.filename for frame in last for part in _COMMUNICATION)


def raised_in(error: BaseException, registry: Registry) -> str:
    """A sentence with the error, the plugin and its method, and the frames from there on."""
    said = f"raised {type(error).__name__}" + (f": {error}" if str(error) else "")
    call = _call_of(error, registry)
    if call is None:
        return f"the plugin {said}"
    frames = "".join(traceback.format_tb(call[1])).rstrip()
    return f"the plugin {call[0]} {said} in {_method(call[1])}{failing_layer(call[1])}\n{frames}"


def failing_layer(trace: TracebackType | None) -> str:
    """The innermost module in whose call an error was raised, with its input; "" without one.

    Such as ", in the layer blocks.2 of Model, Linear(...), on (8, 16) float32".
    """
    calls = [frame.f_locals for frame, _ in traceback.walk_tb(trace) if frame.f_code is MODULE_CALL]
    calls = [call for call in calls if not type(call["self"]).__module__.startswith("hpctrain_plugins.parallelism.")]
    if not calls:
        return ""
    outer, inner, last = calls[0]["self"], calls[-1]["self"], calls[-1]
    name = next((name for name, one in outer.named_modules() if one is inner), "")
    if not (name or type(inner).__module__.startswith("torch.")):
        return ""  # the user's own model: the sentence and the frames say so
    inputs = [one for one in (*last["args"], *last["kwargs"].values()) if isinstance(one, Tensor)]
    told = ", ".join(f"{tuple(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in inputs)
    try:
        kind = repr(inner)
    except Exception:  # the user's own extra_repr
        kind = ""
    kind = type(inner).__name__ if "\n" in kind or not kind else kind
    return f", in {f'the layer {name} of {type(outer).__name__}, ' if name else ''}{kind}" + (
        f", on {told}" if told else ""
    )


def retell_plugin_error(error: BaseException | None, registry: Registry, identity: Identity | None = None) -> None:
    """Raises TrainingError with the plugin that raised `error`, and its frames. The log gets the full traceback.

    Does nothing for hpctrain's own errors, for errors of communication, and if no third party's plugin raised the error.
    """
    while error is not None and not isinstance(error, (HpctrainError, CommunicationError)):
        call = _call_of(error, registry)
        if (
            call is not None
            and not call[0].module.startswith(("hpctrain_plugins.", "hpctrain_tools."))
            and not is_communication(call[1])
        ):
            LOG.info("a plugin failed", exc_info=error)
            here = f"on rank {identity.rank} on {identity.node}: " if identity is not None and identity.size > 1 else ""
            raise TrainingError(here + raised_in(error, registry)) from error
        error = error.__cause__


def _call_of(error: BaseException, registry: Registry) -> tuple[ModuleSource, TracebackType] | None:
    """The plugin whose code was called last before the error, and that call; None if no plugin was involved.

    A plugin's code is everything in its distribution's package. The source's module is the one that was called.
    """
    found, before, trace = None, None, error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        holding = [one for one in registry.sources if _holds(one.module, module)]
        source = next((one for one in holding if one.module == module), holding[0] if holding else None)
        if source is not None and before is None:
            found = replace(source, module=module), trace
        before, trace = source, trace.tb_next
    return found


def _holds(plugin: str, module: str) -> bool:
    package = plugin.rpartition(".")[0]
    return module == plugin or module.startswith(f"{plugin}.") or bool(package and module.startswith(f"{package}."))


def _method(trace: TracebackType) -> str:
    code = trace.tb_frame.f_code
    return str(getattr(code, "co_qualname", code.co_name))  # from Python 3.11 on, it includes the class
