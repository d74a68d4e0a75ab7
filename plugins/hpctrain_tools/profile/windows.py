"""The steps of a training that are recorded: the windows of [profile], and those that `hpctrain profile --now` asks for."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from hpctrain.api import Identity, Job, LiveModel, Membership, Request, UsageError, hookimpl, make_directory, reason
from hpctrain.base.safe_files import closed_directory
from hpctrain_tools.profile.clocks import clock_offset
from hpctrain_tools.profile.gathering import Share, gather
from hpctrain_tools.profile.layout import FOLDER, REQUEST
from hpctrain_tools.profile.options import TorchProfilerOptions
from hpctrain_tools.profile.recording import Ranges, Recording

LOG = logging.getLogger("hpctrain")


class Window:
    """Some steps, recorded on this rank or only counted. It is a part of the run for that time."""

    def __init__(
        self,
        options: TorchProfilerOptions,
        begin: Callable[[Window], bool],
        done: Callable[[], None],
        answer: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """begin: called before the first step; whether the window may begin. done: called after the last step. answer: to the one
        who has asked for it."""
        self.options, self.answer, self.is_asked = options, answer or (lambda told: None), answer is not None
        self.recording: Recording | None = None
        """None on ranks that are not traced."""
        self.why = ""
        """A clause if this rank should be traced and can't be."""
        self.first, self.last = 0, 0
        """The steps that are kept, counted from 1; 0 before the first."""
        self._begin, self._done = begin, done
        self._has_begun, self._steps = False, 0

    @hookimpl
    def hpctrain_phase_begin(self, phase: str, step: int) -> None:
        if phase == "data":  # the first one of a step
            self._has_begun = self._has_begun or self._begin(self)
            self._begin_step(step + 1)
        if self.recording is not None:
            self.recording.begin_phase(phase)

    @hookimpl
    def hpctrain_phase_end(self, phase: str) -> None:
        if self.recording is not None:
            self.recording.end_phase(phase)

    @hookimpl
    def hpctrain_step_end(self, step: int) -> None:
        if self.recording is not None:
            self.recording.end_step()
        self._steps += 1
        self.last = step if self.first else 0
        if self._steps == self.options.warmup + self.options.record:
            self._done()

    def _begin_step(self, step: int) -> None:
        if not self._has_begun:
            return
        kept = self._steps == self.options.warmup
        if kept:
            self.first = step
        if self.recording is None:
            return
        try:
            if not self._steps:
                self.recording.warm_up()
            if kept:
                self.recording.record()
            self.recording.begin_step(step)
        except Exception as error:  # a trace must not end a training: the job's own code may have a profiler at work
            LOG.info("a trace failed", exc_info=True)
            self.recording, self.why = None, f"torch.profiler did not start: {reason(error)}"


class _Marks:
    """Phases as ranges of a vendor's profiler."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges

    @hookimpl
    def hpctrain_phase_begin(self, phase: str) -> None:
        if phase == "data":
            self._ranges.end_all()  # a rank without memory ends its phases without a call
        self._ranges.begin(phase)

    @hookimpl
    def hpctrain_phase_end(self, phase: str) -> None:
        self._ranges.end(phase)


class Profiling:
    """The profiler of one run. Steps in which nothing is counted or recorded know nothing of it."""

    def __init__(self, options: TorchProfilerOptions) -> None:
        self._options, self._made = options, 0
        self._window: Window | None = None

    @hookimpl
    def hpctrain_job_start(self, job: Job, identity: Identity, model: LiveModel, membership: Membership) -> None:
        self._identity, self._membership, self._model = identity, membership, model
        self._directory = job.output_dir / FOLDER
        if self._options.ranges:
            self._mark_phases()
        if self._options.record:
            self._wait()

    @hookimpl
    def hpctrain_request(self, request: Request, step: int) -> bool | None:
        if request.name != REQUEST:
            return None
        try:
            if self._window is not None:
                raise UsageError("it records a window already; ask again when that is done")
            options = self._options.asked(request.values, self._identity.size)
        except UsageError as error:
            request.answer({"state": "refused", "why": str(error)})
            return True
        first, ranks = step + 1 + options.warmup, options.chosen(self._identity.size)
        about = {"first": first, "last": first + options.record - 1, "ranks": ranks}

        def answer(told: dict[str, Any]) -> None:
            request.answer({**about, **told})

        answer({"state": "taken"})
        self._window = Window(options, self._begin, self._finish, answer)
        self._membership.join(self._window)
        return True

    @hookimpl
    def hpctrain_job_end(self) -> None:
        if self._window is not None:
            self._finish(cut=True)

    @hookimpl
    def hpctrain_exception(self) -> None:
        """Keep what this rank has, where it is: the others may be gone."""
        window, self._window = self._window, None
        if window is None or window.recording is None:
            return
        target = self._directory / f"failed-step-{window.first:08d}"
        try:
            with closing(window.recording):
                make_directory(target)
                window.recording.stop()
                files = window.recording.write(target, self._stem)
            LOG.info("profile: the window that the error has cut: %s", ", ".join(map(str, files)) or "nothing recorded")
        except Exception as error:  # the first error is the one to report
            LOG.info("profile: the window that the error has cut is lost: %s", reason(error))

    @property
    def _stem(self) -> str:
        return f"rank-{self._identity.rank:05d}"

    def _mark_phases(self) -> None:
        device = self._model.device
        ranges = Ranges.of_vendor(device)
        if ranges is not None:
            self._membership.join(_Marks(ranges))
        elif self._identity.rank == 0:
            LOG.warning(
                "[profile] ranges: no profiler of a vendor's shows ranges of %s ranks; none are made", device.type
            )

    def _wait(self) -> None:
        """Let the next window of the job begin in some steps."""
        self._membership.join(Window(self._options, self._begin, self._finish), after=self._options.wait)

    def _begin(self, window: Window) -> bool:
        """Begin a window, or put it off by a step while one is open that was asked for."""
        if self._window not in (None, window):
            self._membership.leave(window)
            self._membership.join(window, after=1)
            return False
        self._window = window
        if self._identity.rank in window.options.chosen(self._identity.size):
            window.recording = Recording(window.options, self._model.device)
        return True

    def _finish(self, cut: bool = False) -> None:
        """Bring the traces of the open window together. Collective."""
        window, self._window = self._window, None
        assert window is not None
        self._membership.leave(window)
        self._membership.busy("profile")
        share = Share(self._identity.rank, self._identity.node, self._model.place, why=window.why)
        local = None if window.recording is None else self._write(window.recording, share)
        if window.first:
            share.offset_ns, share.error_ns = clock_offset()
            self._gather(window, share, local or Path(), cut)
        else:
            self._lose(window)
        if local is not None:
            shutil.rmtree(local, ignore_errors=True)
        if not window.is_asked:
            self._made += 1
            if not cut and self._made != self._options.repeat:
                self._wait()

    def _lose(self, window: Window) -> None:
        why = "the training ended before a step of the window"
        window.answer({"state": "refused", "why": why})
        if self._identity.rank == 0:
            print(f"profile      nothing was recorded: {why}", flush=True)

    def _write(self, recording: Recording, share: Share) -> Path | None:
        """Write this rank's files into a new directory. A trace that fails must not end the training."""
        local = None
        try:
            with closing(recording):
                recording.stop()
                local = closed_directory("profile-")
                share.give(recording.write(local, self._stem))
            share.begin_ns, share.end_ns = recording.begin, recording.end
        except Exception as error:
            LOG.info("a trace failed", exc_info=True)
            share.files, share.why = [], f"its trace could not be written: {reason(error)}"
        return local

    def _gather(self, window: Window, share: Share, local: Path, cut: bool) -> None:
        come: list[int] = []

        def has_come(rank: int) -> None:
            come.append(rank)
            window.answer({"state": "gathering", "come": come})

        about = {
            "format": 1, "first": window.first, "last": window.last, "cut": cut, "size": self._identity.size,
            "options": window.options.model_dump(),
            "groups": {group.group_desc: axis for axis, group in self._model.groups.items()},
        }  # fmt: skip
        name = self._directory / f"step-{window.first:08d}"
        found = gather(share, local, name, about, lambda: self._membership.busy("profile"), has_come)
        if self._identity.rank:
            return
        if found is None:
            window.answer({"state": "refused", "why": f"{name} could not be written; the job's output says why"})
            return
        path, index = found
        for rank, why in index["missing"].items():
            LOG.warning("profile: rank %s: %s", rank, why)
        print(f"profile      steps {window.first} to {window.last}: {path}", flush=True)
        window.answer({"state": "done", "window": path.name, "missing": index["missing"]})
