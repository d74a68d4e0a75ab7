"""Records the steps of a window on one rank, with torch.profiler."""

from __future__ import annotations

import errno
import gzip
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from hpctrain.api import MemoryHistory, is_accelerator, is_profiling, profiler_ranges, profiler_settings
from hpctrain_tools.profile.layout import SNAPSHOT, TRACE
from hpctrain_tools.profile.options import TorchProfilerOptions

LOG = logging.getLogger("hpctrain")

# the level of gzip: a ninth of the time of the default for a third more bytes
_LEVEL = 3
_PIECE = 2**20
_PROBE = re.compile(rb"^USDT:.*profiler_(start|stop)\n?", re.MULTILINE)
# the newest events that a snapshot of memory has; torch says "several KB" each
_EVENTS = 100_000


@contextmanager
def _without_probes() -> Iterator[None]:
    """Keep the lines with which Kineto marks the begin and the end of a trace off the screen; pass on what else comes meanwhile."""
    screen, kept = os.dup(2), os.memfd_create("kineto")
    os.dup2(kept, 2)
    try:
        yield
    finally:
        os.dup2(screen, 2)
        content = os.pread(kept, os.fstat(kept).st_size, 0)
        os.write(2, _PROBE.sub(b"", content))
        os.close(kept)
        os.close(screen)


class Ranges:
    """Named ranges around phases. A phase that fails ends without a call, so an outer one's end ends it."""

    def __init__(self, begin: Callable[[str], object], end: Callable[[], object]) -> None:
        self._begin, self._end = begin, end
        self._open: list[str] = []

    @staticmethod
    def of_vendor(device: torch.device) -> Ranges | None:
        """Ranges that profilers of the device's vendor show; None where there are none."""
        found = profiler_ranges(device)
        return None if found is None else Ranges(*found)

    @staticmethod
    def in_trace() -> Ranges:
        """Ranges that torch.profiler records."""
        entered: list[record_function] = []

        def begin(name: str) -> None:
            entered.append(record_function(name))
            entered[-1].__enter__()

        return Ranges(begin, lambda: entered.pop().__exit__(None, None, None))

    def begin(self, name: str) -> None:
        """A range begins."""
        self._open.append(name)
        self._begin(name)

    def end(self, name: str) -> None:
        """The newest range of this name ends, and those in it."""
        while name in self._open:
            self._end()
            if self._open.pop() == name:
                return

    def end_all(self) -> None:
        """Every range ends."""
        while self._open:
            self._open.pop()
            self._end()


def _is_whole(trace: Path) -> bool:
    """Whether a JSON file has its end."""
    try:
        with open(trace, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 16))
            return file.read().rstrip().endswith(b"}")
    except OSError:
        return False


class Recording:
    """The profiler of a window on this rank."""

    def __init__(self, options: TorchProfilerOptions, device: torch.device) -> None:
        has_device = is_accelerator(device)
        self._profile = profile(
            activities=supported_activities() if has_device else [ProfilerActivity.CPU],
            record_shapes=options.shapes, profile_memory=options.memory, with_stack=options.stacks,
            experimental_config=profiler_settings() if has_device else None,
        )  # fmt: skip
        self._history = MemoryHistory(device) if options.snapshot else None
        if self._history is not None and not self._history.is_kept:
            LOG.warning(
                "[profile] snapshot: torch keeps no history of the memory of %s; no snapshot is written", device.type
            )
            self._history = None
        self._ranges = Ranges.in_trace()
        self.begin = 0
        """The time at which recording began, in ns by this node's clock; 0 before."""
        self.end = 0

    def warm_up(self) -> None:
        """Start the profiler; it keeps nothing yet. Raises RuntimeError if there is another one."""
        if is_profiling():
            raise RuntimeError("another profiler of torch is at work in this process")
        self._profile.prepare_trace()

    def record(self) -> None:
        """Keep what happens from now on."""
        with _without_probes():
            self._profile.start_trace()
        self.begin = time.time_ns()
        if self._history is not None:
            self._history.begin(_EVENTS)

    def begin_step(self, step: int) -> None:
        """Step `step` begins, counted from 1. Under this name, TensorBoard's plugin and HTA know steps."""
        self._ranges.begin(f"ProfilerStep#{step}")

    def end_step(self) -> None:
        """The step is done."""
        self._ranges.end_all()

    def begin_phase(self, phase: str) -> None:
        """A phase begins."""
        self._ranges.begin(phase)

    def end_phase(self, phase: str) -> None:
        """The phase is over."""
        self._ranges.end(phase)

    def stop(self) -> None:
        """The window is over."""
        self._ranges.end_all()
        with _without_probes():
            if not self.begin:
                self._profile.start_trace()  # else the next profiler would find this one
            self._profile.stop_trace()
        self.end = time.time_ns()

    def write(self, directory: Path, stem: str) -> list[Path]:
        """Write the files of the window; none if it ended while the profiler warmed up. Raises OSError."""
        if not self.begin:
            return []
        whole, trace = directory / f"{stem}.json", directory / f"{stem}{TRACE}"
        self._profile.export_chrome_trace(str(whole))
        if not _is_whole(whole):  # torch only logs that
            code = errno.ENOSPC if shutil.disk_usage(directory).free < _PIECE else errno.EIO
            raise OSError(code, os.strerror(code), str(directory))
        with open(whole, "rb") as source, gzip.open(trace, "wb", _LEVEL) as target:
            shutil.copyfileobj(source, target, _PIECE)
        whole.unlink()
        if self._history is None:
            return [trace]
        snapshot = directory / f"{stem}{SNAPSHOT}"
        self._history.write(str(snapshot))
        return [trace, snapshot]

    def close(self) -> None:
        """Keep no more of who takes memory, which would slow the rest of the training."""
        if self.begin and self._history is not None:
            self._history.end()
