"""Errors of other people's code as sentences: the plugin, the job file's callable or the model's layer that raised, and the frames
of its files alone."""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType

from torch import Tensor

from hpctrain.base.errors import HpctrainError, TrainingError, UsageError
from hpctrain.base.torch_private import MODULE_CALL
from hpctrain.contracts.identity import Identity
from hpctrain.mpi.errors import CommunicationError
from hpctrain.ranks.watchdog.stacks import FIRST_PARTY
from hpctrain.registry.entry_points import ModuleSource
from hpctrain.registry.registry import Registry

LOG = logging.getLogger("hpctrain")

_COMMUNICATION = (os.path.join("torch", "distributed"), os.path.join("hpctrain", "mpi"))
_USERS_MODEL = "hpctrain.registry.user_code.model"
_HERE = str(Path(__file__).parents[1])  # of a checkout, too, which lies in none of Python's directories
_LIBRARIES = tuple(
    path + os.sep for path in {_HERE, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
)


def is_communication(trace: TracebackType | None) -> bool:
    """Whether communication raised the error, so that the cause may be another rank."""
    last = traceback.extract_tb(trace)[-3:]
    return any(part in frame.filename for frame in last for part in _COMMUNICATION)


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Wrap a call of a callable that the job file names; `what` is the subject of the error's sentence.

    An error inside the user's files becomes TrainingError. If the call has reached none of them, the reference or its
    arguments are wrong: UsageError.
    """
    try:
        yield
    except HpctrainError:
        raise
    except (Exception, SystemExit, GeneratorExit) as error:  # a script's sys.exit must not end a rank without a word
        sentence, frames = f"{what} {raised(error)}", _users_frames(error.__traceback__)
        if frames:
            raise TrainingError(f"{sentence}\n{frames}") from error
        raise UsageError(f"{sentence}; check what is called and its arguments, the other keys of the table") from error


def retell_model_error(error: BaseException | None) -> None:
    """Raise TrainingError if the user's own model or loss raised `error` on a batch, or if a layer did in a forward that an axis
    cuts into stages; do nothing for other errors.

    Called late, because an axis may explain an error of its first micro batch better.
    """
    if error is None or isinstance(error, HpctrainError):
        return
    what, batch, trace = "the model's forward", "", error.__traceback__
    while trace is not None and not _calls_users_model(trace.tb_frame):
        trace = trace.tb_next
    if trace is not None:
        variables = trace.tb_frame.f_locals
        what = f"[model] name = {variables['self'].name!r}: its {trace.tb_frame.f_code.co_name}"
        batch = f", on a batch of {_shapes(variables.get('batch'))}"
    else:
        while error is not None and not failing_layer(error.__traceback__):
            error = error.__cause__  # torch's pipeline schedules wrap the error of a stage
        if error is None:
            return
        trace = error.__traceback__
    if is_communication(trace):
        return
    LOG.info("%s failed", what, exc_info=error)
    sentence = f"{what} {raised(error)}{failing_layer(trace)}{batch}"
    raise TrainingError(f"{sentence}\n{_users_frames(trace)}".rstrip()) from error


def _calls_users_model(frame: FrameType) -> bool:
    """Whether a frame is that of a model plugin's method, with a `batch`, which calls the user's module or loss."""
    return frame.f_globals.get("__name__") == _USERS_MODEL and frame.f_code.co_name in ("forward", "loss")


def raised_in(error: BaseException, registry: Registry) -> str:
    """A sentence with the error, the plugin and its method, and the frames from there on."""
    call = _call_of(error, registry)
    if call is None:
        return f"the plugin {raised(error)}"
    source, trace = call
    frames, code = "".join(traceback.format_tb(trace)).rstrip(), trace.tb_frame.f_code
    method = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on, it includes the class
    return f"the plugin {source} {raised(error)} in {method}{failing_layer(trace)}\n{frames}"


def failing_layer(trace: TracebackType | None) -> str:
    """The innermost module in whose call an error was raised, with its input; "" without one.

    Such as ", in the layer blocks.2 of Model, Linear(...), on (8, 16) float32".
    """
    calls = [frame.f_locals for frame, _ in traceback.walk_tb(trace) if frame.f_code is MODULE_CALL]
    # the modules of an axis are not the user's
    calls = [call for call in calls if not type(call["self"]).__module__.startswith("hpctrain_plugins.parallelism.")]
    if not calls:
        return ""
    outer, inner, last = calls[0]["self"], calls[-1]["self"], calls[-1]
    name = next((name for name, module in outer.named_modules() if module is inner), "")
    if not (name or type(inner).__module__.startswith("torch.")):
        return ""  # the user's own model: the sentence and the frames say so
    inputs = [value for value in (*last["args"], *last["kwargs"].values()) if isinstance(value, Tensor)]
    shapes = ", ".join(map(_shape, inputs))
    try:
        kind = repr(inner)
    except Exception:  # the user's own extra_repr
        kind = ""
    kind = type(inner).__name__ if "\n" in kind or not kind else kind  # several lines: it has submodules
    layer = f"the layer {name} of {type(outer).__name__}, " if name else ""
    return f", in {layer}{kind}" + (f", on {shapes}" if shapes else "")


def retell_plugin_error(error: BaseException | None, registry: Registry, identity: Identity | None = None) -> None:
    """Raise TrainingError with the plugin that raised `error`, and its frames. The log gets the full traceback.

    Does nothing for hpctrain's own errors, for errors of communication, and if no third party's plugin raised the error.
    """
    while error is not None and not isinstance(error, (HpctrainError, CommunicationError)):
        call = _call_of(error, registry)
        # a first-party plugin that raises is hpctrain's own fault: its traceback stays whole
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
    """The plugin that was called last before the error, and that call; None if no plugin was involved.

    A plugin's code is everything in its distribution's package. The source's module is the one that was called.
    """
    call, before, trace = None, None, error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        sources = [source for source in registry.sources if _holds(source.module, module)]
        source = next((source for source in sources if source.module == module), sources[0] if sources else None)
        if source is not None and before is None:  # from outside into a plugin: calls within it don't count
            call = replace(source, module=module), trace
        before, trace = source, trace.tb_next
    return call


def _holds(plugin: str, module: str) -> bool:
    """Whether `module` belongs to the package of the module `plugin`."""
    package = plugin.rpartition(".")[0]
    return module == plugin or module.startswith(f"{plugin}.") or bool(package and module.startswith(f"{package}."))


def raised(error: BaseException) -> str:
    """The end of a sentence: "raised ValueError: its message"."""
    return f"raised {type(error).__name__}" + (f": {error}" if str(error) else "")


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _shapes(batch: object) -> str:
    """The tensors of a batch, such as "input (2, 4) float32, labels (2,) int64"."""
    entries = (
        batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, (list, tuple)) else ()
    )
    shapes = [f"{name} {_shape(value)}" for name, value in entries if isinstance(value, Tensor)]
    return ", ".join(shapes) or type(batch).__name__


def _users_frames(trace: TracebackType | None) -> str:
    """The frames in files that belong to no library."""
    frames = [
        frame
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith(("<", *_LIBRARIES)) and FIRST_PARTY.search(frame.filename) is None
    ]
    return "".join(traceback.format_list(frames)).rstrip()
