"""Reads Python stacks: the line at which training stands, the communication in which it waits, the lines of workers that load.

torch's flight recorder names an operation that the stack does not tell.
"""

from __future__ import annotations

import itertools
import linecache
import logging
import multiprocessing
import os
import re
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import typing_extensions

from hpctrain.base.torch_private import recorded_operations

LOG = logging.getLogger("hpctrain")

_HPCTRAIN = str(Path(__file__).parents[2])
_TORCH = str(Path(torch.__file__).parent)
_COMMUNICATION = (
    os.path.join(_TORCH, "distributed"),
    os.path.join(_HPCTRAIN, "mpi"),
    os.path.join(_HPCTRAIN, "base", "store"),
)
FIRST_PARTY = re.compile("/hpctrain_(plugins|tools)/")
"""The files of first-party plugins and tools."""
_STANDARD = sysconfig.get_path("stdlib")
# packages are often in two places: a site's, and a virtual environment on top
_INSTALLED = (sysconfig.get_path("purelib"), str(Path(_TORCH).parent))
_DEPRECATED = typing_extensions.__file__  # wraps the functions that torch will rename
_COLLECTIVES = os.path.join(_TORCH, "distributed", "distributed_c10d.py")

# calls that wait without a Python frame: for an operation of gloo's, or on an accelerator for what NCCL has yet to finish
_BLOCKING = (".wait(", ".item()", ".tolist()", ".cpu()", "synchronize(")

_LOOK = 1.0  # seconds between two looks of a worker, at its own line and at its rank
_LONGEST = 512  # bytes of a line

_shared: list[Sequence[Any]] = []  # for each pool of this process the memory in which its workers write

UNNAMED = "an operation with other ranks"
"""An operation of which the stack does not tell the name."""


class Spot(NamedTuple):
    """The line at which a thread stands. communication: the operation in which it waits for other ranks, or None."""

    line: str
    communication: str | None


def spot_of(frame: FrameType | None) -> Spot:
    """The innermost line of a stack that is neither torch's nor Python's own, and the user's line above it."""
    frames = list(_outwards(frame))
    libraries = 0
    while libraries < len(frames) and _is_library(frames[libraries]):
        libraries += 1
    places = frames[libraries:] or frames
    shown = [_line(place) for place in places[:1]]
    if places and _is_ours(places[0].f_code.co_filename):
        user = next((place for place in places if not _is_ours(place.f_code.co_filename) and _is_users(place)), None)
        shown += [f"called from {_line(user)}"] if user is not None else []
    inner = [one for one in frames[:libraries] if _communicates(one)]
    communication = _operation(inner) if inner else None
    if communication is None and places and any(call in _source(places[0]) for call in _BLOCKING):
        communication = UNNAMED
    return Spot(", ".join(shown) or "outside Python", communication)


def all_stacks() -> str:
    """The stacks of all threads, as in a traceback."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(number, 'without a name')}:\n{''.join(traceback.format_stack(frame))}".rstrip()
        for number, frame in sys._current_frames().items()
    )


def frame_of(thread: int) -> FrameType | None:
    """The innermost frame of a thread."""
    return sys._current_frames().get(thread)


def failed_line(trace: TracebackType | None) -> str | None:
    """The line, outside of libraries, at which communication with other ranks has failed; None if the error is of another kind."""
    places = list(traceback.walk_tb(trace))
    if not places:
        return None
    last, line = places[-1]
    if not (_communicates(last) or ".wait(" in linecache.getline(last.f_code.co_filename, line)):
        return None
    frame, line = next((place for place in reversed(places) if not _is_library(place[0])), places[-1])
    path = frame.f_code.co_filename
    return f"{path}:{line} in {frame.f_code.co_name}: {linecache.getline(path, line).strip()}"


def loading_line(thread: int | None) -> str | None:
    """The innermost line of a thread that is the user's, else that is a package's; None if it runs neither."""
    frames = [
        one for one in _outwards(frame_of(thread or 0))
        if not (_is_library(one) or _is_ours(one.f_code.co_filename))
    ]  # fmt: skip
    shown = next(filter(_is_users, frames), next(iter(frames), None))
    return None if shown is None else _line(shown)


def unfinished() -> list[str]:
    """The operations of this process that torch has recorded and that have not ended, oldest first."""
    try:
        return [_recorded(one) for one in recorded_operations() if not one["retired"]]
    except Exception:  # another torch's: the watchdog's report must come without it
        LOG.info("torch's flight recorder can't be read", exc_info=True)
        return []


def _recorded(entry: dict[str, Any]) -> str:
    name, described = entry["process_group"]
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    shapes = zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    tensors = ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype in itertools.islice(shapes, 1))
    return f"{entry['profiling_name']} number {number} of {described or name}, {tensors}, {entry['state']}"


def _outwards(frame: FrameType | None) -> Iterable[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _communicates(frame: FrameType) -> bool:
    """Whether it is code that waits for other ranks: torch's, hpctrain's, or that of a package which says HPCTRAIN_COMMUNICATES."""
    package = sys.modules.get(str(frame.f_globals.get("__name__")).partition(".")[0])
    says = package is not None and vars(package).get("HPCTRAIN_COMMUNICATES", False)
    return bool(says) or frame.f_code.co_filename.startswith(_COMMUNICATION)


def _is_library(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if _communicates(frame) or path.startswith(_TORCH) or path == _DEPRECATED:
        return True
    return path.startswith((_STANDARD, "<")) and not path.startswith(_INSTALLED)


def _is_ours(path: str) -> bool:
    return path.startswith(_HPCTRAIN) or FIRST_PARTY.search(path) is not None


def _is_users(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    return not _is_library(frame) and not path.startswith((*_INSTALLED, "<")) and frame.f_code.co_name != "<module>"


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    short = os.path.relpath(path, os.path.dirname(_HPCTRAIN)) if path.startswith(_HPCTRAIN) else path
    return f"{short}:{frame.f_lineno} in {frame.f_code.co_name}: {_source(frame)}".rstrip(": ")


def _source(frame: FrameType) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()


def _operation(inner: Sequence[FrameType]) -> str:
    """The call of torch.distributed's that the user made; innermost frame first."""
    calls = [
        frame for frame in inner
        if frame.f_code.co_filename == _COLLECTIVES and not frame.f_code.co_name.startswith("_")
    ]  # fmt: skip
    if not calls:
        last = inner[-1].f_code
        return f"{last.co_name} of {Path(last.co_filename).stem}"
    return calls[-1].f_code.co_name


def share_lines(context: Any, workers: int) -> Sequence[Any]:
    """Memory for the line of each worker of a pool. context: of multiprocessing, which starts the workers."""
    lines = [context.RawArray("c", _LONGEST) for _ in range(workers)]
    _shared.append(lines)
    return lines


def forget_lines(lines: Sequence[Any]) -> None:
    """The workers have ended."""
    _shared.remove(lines)


def be_watched(line: Any) -> None:
    """Let this worker write down its line now and then, and end when its rank has ended in any way."""
    main = threading.main_thread().ident
    threading.Thread(target=_watch, args=(line, main, os.getppid()), name="end with the rank", daemon=True).start()


def worker_lines() -> list[str]:
    """The lines at which workers of this process run code of the user's, each once."""
    return list(dict.fromkeys(line.value.decode(errors="replace") for lines in _shared for line in lines if line.value))


def _watch(line: Any, main: int | None, parent: int) -> None:
    """parent: of this process. It is the rank, or a server that lives as long as a worker does: then the rank counts."""
    rank = multiprocessing.parent_process()
    while os.getppid() == parent and (rank is None or rank.is_alive()):
        line.value = (loading_line(main) or "").encode()[: _LONGEST - 1]
        time.sleep(_LOOK)
    os._exit(1)
