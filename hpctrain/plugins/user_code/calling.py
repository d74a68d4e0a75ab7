"""Calls the user's own code; reports its errors with the key of the job file and only the user's stack frames."""

from __future__ import annotations

import logging
import os
import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

import torch

from hpctrain.base.errors import HpctrainError, TrainingError, UsageError
from hpctrain.plugins.blame import failing_layer, is_communication
from hpctrain.ranks.watchdog.stacks import FIRST_PARTY

LOG = logging.getLogger("hpctrain")

_HERE = str(Path(__file__).parents[2])
_LIBRARIES = tuple(
    path + os.sep for path in {_HERE, *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))}
)


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
    except (Exception, SystemExit, GeneratorExit) as error:
        said = f"{what} raised {type(error).__name__}" + (f": {error}" if str(error) else "")
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
        if frames:
            raise TrainingError(f"{said}\n{''.join(traceback.format_list(frames))}".rstrip()) from error
        raise UsageError(f"{said}; check what is called and its arguments, the other keys of the table") from error


def retell_model_error(error: BaseException, calls: Mapping[CodeType, str]) -> None:
    """Raise TrainingError if the user's own model or loss raised `error` on a batch; do nothing for other errors.

    calls: methods of a model plugin that take a `batch` and call the user's code, with their names for the sentence. Called
    late, because an axis may explain an error of its first micro batch better.
    """
    if isinstance(error, HpctrainError):
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code not in calls:
        trace = trace.tb_next
    if trace is None:
        _retell_layer_error(error)
        return
    if is_communication(trace):
        return
    frames = traceback.extract_tb(trace)[1:]
    called = trace.tb_frame.f_locals
    what = f"[model] name = {called['self'].name!r}: its {calls[trace.tb_frame.f_code]}"
    said = f"{what} raised {type(error).__name__}" + (f": {error}" if str(error) else "") + failing_layer(trace)
    users = "".join(traceback.format_list([frame for frame in frames if _is_users(frame.filename)]))
    LOG.info("%s failed", what, exc_info=error)
    raise TrainingError(f"{said}, on a batch of {_shapes(called.get('batch'))}\n{users}".rstrip()) from error


def _retell_layer_error(error: BaseException | None) -> None:
    """Raise TrainingError if a layer raised `error`, or its cause, in a forward that an axis cuts into stages."""
    while error is not None and not failing_layer(error.__traceback__):
        error = error.__cause__
    if error is None or is_communication(error.__traceback__):
        return
    LOG.info("the model's forward failed", exc_info=error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    said = f"the model's forward raised {type(error).__name__}" + (f": {error}" if str(error) else "")
    users = "".join(traceback.format_list(frames))
    raise TrainingError(f"{said}{failing_layer(error.__traceback__)}\n{users}".rstrip()) from error


def _shapes(batch: object) -> str:
    """input (2, 4) float32, labels (2) int64."""
    named = (
        batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, (list, tuple)) else ()
    )
    told = [
        f"{name} {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for name, value in named
        if isinstance(value, torch.Tensor)
    ]
    return ", ".join(told) or type(batch).__name__


def _is_users(file: str) -> bool:
    return not file.startswith(("<", *_LIBRARIES)) and FIRST_PARTY.search(file) is None
