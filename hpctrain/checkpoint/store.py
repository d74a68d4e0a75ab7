"""The checkpoints of a run: saved under a temporary name, renamed when complete, and restored from the newest whole one.

Every wait is a collective of a group, so the group's timeout ends it.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.base.devices import use_device
from hpctrain.base.errors import CheckpointError, UsageError, reason
from hpctrain.checkpoint.directory import CheckpointDirectory
from hpctrain.checkpoint.finding import describe_differences, hint_of, not_wanted, recognize
from hpctrain.checkpoint.retention import Retention
from hpctrain.contracts.checkpoint import CheckpointFormat
from hpctrain.contracts.pieces import Piece, State
from hpctrain.ranks.json_collectives import share, survey, together

LOG = logging.getLogger("hpctrain")

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Restored:
    """The result of a restore, besides the pieces that were filled in place."""

    step: int
    path: Path
    values: dict[str, Any]
    absent: list[str]
    """This rank's optional pieces that are unchanged, because the checkpoint lacks them or has them in another shape."""


class _Background(threading.Thread):
    """A save on a thread, which sets `path` or `error`, and the seconds that it took."""

    def __init__(self, step: int, save: Callable[[], Path], device: torch.device) -> None:
        super().__init__(name=f"checkpoint-{step}", daemon=True)  # daemon: it must not hold up a job that has failed
        self.step, self._save, self._device = step, save, device
        self.path: Path | None = None
        self.error: Exception | None = None
        self.seconds = 0.0

    def run(self) -> None:
        begin = time.monotonic()
        try:
            use_device(self._device)  # each thread has a current device of its own
            _give_way()
            self.path = self._save()
        except Exception as error:
            self.error = error  # `finish` raises it in the training
        self.seconds = time.monotonic() - begin


class CheckpointStore:
    """Saves and restores; every method is collective over the group."""

    def __init__(
        self,
        root: Path,
        format: CheckpointFormat,
        formats: Sequence[CheckpointFormat],
        group: dist.ProcessGroup,
        retention: Retention | None = None,
        background_group: dist.ProcessGroup | None = None,
        device: torch.device = _CPU,
    ) -> None:
        """root: the run's directory of checkpoints, equal on all ranks and on a file system that they share.

        format: for `save`. formats: for `restore`. retention: which checkpoints stay; None for all.
        background_group: a second group of the same ranks in the same order, for `save_in_background`. device: the rank's.
        """
        self._directory = CheckpointDirectory(root)
        self._writer = format.writer()
        self._formats = {format.name: format} | {other.name: other for other in formats if other.name != format.name}
        self._retention = retention or Retention()
        self._group, self._background_group, self._device = group, background_group, device
        self._background: _Background | None = None
        self.newest: Path | None = None
        """The newest complete checkpoint that was saved or restored; a background save counts once it was waited for."""
        self.drain_seconds = 0.0
        """The time for which background saves wrote on this rank, beside the training; each counts once it was waited for."""

    def save(self, step: int, state: State) -> Path:
        """Save now and return the path of the complete checkpoint, whose values get the key `step`.

        If it fails on one rank, all ranks raise OSError or CheckpointError, and earlier checkpoints are unchanged.
        """
        self.finish()
        self.newest = self._save(step, state, self._group)
        return self.newest

    def save_in_background(self, step: int, state: State) -> None:
        """Copy the state now and write the copy on a thread. First waits for the previous save and raises its error."""
        if self._background_group is None:
            raise ValueError("save_in_background needs the store's background_group")
        self.finish()
        snapshot = together(self._group, lambda: self._writer.snapshot(state))
        # a group of its own, since its collectives must not mix with those of the training
        save = partial(self._save, step, snapshot, self._background_group)
        self._background = _Background(step, save, self._device)
        self._background.start()

    @property
    def background_step(self) -> int:
        """The step of the save that runs in the background; 0 without one."""
        return 0 if self._background is None else self._background.step

    def is_over(self) -> bool:
        """Whether a background save has ended on every rank, with or without success; doesn't wait. False without a save."""
        if self._background is None:
            return False
        writing = torch.tensor(int(self._background.is_alive()))
        dist.all_reduce(writing, op=dist.ReduceOp.MAX, group=self._group)  # all must `finish` after the same step
        return not writing.item()

    def finish(self) -> Path | None:
        """Wait for the background save and return its path, or None without a save; raises its error."""
        running, self._background = self._background, None
        if running is None:
            return None
        running.join()
        self.drain_seconds += running.seconds
        if running.error is not None:
            raise running.error
        self.newest = running.path
        return running.path

    def restore(
        self,
        pieces: list[Piece],
        path: Path | None = None,
        optional: tuple[str, ...] = (),
        required: tuple[str, ...] = (),
    ) -> Restored | None:
        """Fill `pieces` from `path`, or else from the newest whole checkpoint; None if there is no checkpoint.

        `pieces` are all of this rank's. Together the ranks must ask for every tensor of the checkpoint; only names that begin
        with one of `optional` may be missing on either side. Damaged checkpoints are skipped with a warning, unless `path`
        is given. UsageError: `path` doesn't exist. CheckpointError: no checkpoint can be used, or one is of another model or
        lacks one of the values `required`; such a checkpoint is never skipped.
        """
        self.finish()
        try:
            candidates = [Path(name) for name in share(self._group, lambda: list(map(str, self._candidates(path))))]
        except OSError as error:
            raise CheckpointError(f"{path or self._directory.root} can't be accessed: {reason(error)}") from error
        reasons: list[str] = []
        # A damaged checkpoint may fill pieces with garbage that the next one lacks.
        may_lack = [piece.tensor.detach() for piece in pieces if piece.name.startswith(optional)]
        before = [tensor.clone() for tensor in may_lack] if len(candidates) > 1 else []
        for directory in candidates:
            outcome = self._restore_one(directory, pieces, optional, required)
            if isinstance(outcome, Restored):
                self._directory.began, self.newest = outcome.step, outcome.path
                return outcome
            reasons.append(outcome)
            for tensor, value in zip(may_lack, before, strict=False):  # without a next candidate, `before` is empty
                tensor.copy_(value)
            if path is None and self._group.rank() == 0:
                LOG.warning("checkpoint %s can't be used and is skipped: %s", directory.name, outcome)
        if path is not None:
            hint = share(self._group, lambda: hint_of(path))
            raise CheckpointError(f"checkpoint {path} can't be used: {reasons[0]}{hint}")
        if reasons:
            listed = "".join(f"\n  {reason}" for reason in reasons)
            raise CheckpointError(f"none of the checkpoints in {self._directory.root} can be used:{listed}")
        return None

    def _save(self, step: int, state: State, group: dist.ProcessGroup) -> Path:
        """Write under a temporary name, then rename. `state` must not change meanwhile: it isn't copied."""
        state = State(state.pieces, {**state.values, "step": step})
        temporary = Path(share(group, lambda: str(self._directory.begin(step))))
        try:
            # three times together: one rank's error ends the save on all before the next part
            together(group, lambda: _check_there(temporary, group.rank()))
            together(group, lambda: self._writer.write(state, temporary, group))
            final = Path(share(group, lambda: str(self._directory.commit(temporary))))
        except Exception:
            if group.rank() == 0:
                self._directory.discard(temporary)
            raise
        if group.rank() == 0:  # the others go on: nothing here decides about the save
            self._retention.saved(final, state.values)
            try:
                self._directory.retain(partial(self._retention.staying, self._read_values), final)
            except OSError as error:  # too many checkpoints do no harm
                LOG.warning("could not delete old checkpoints in %s: %s", self._directory.root, reason(error))
        return final

    def _candidates(self, path: Path | None) -> list[Path]:
        """The directories to try. Runs on rank 0."""
        if path is None:
            self._directory.clean()
            return self._directory.candidates()
        if not path.exists():
            raise UsageError(f"there is no checkpoint {path}")
        return [path]

    def _read_values(self, directory: Path) -> dict[str, Any]:
        format = recognize(directory, self._formats.values())
        return {} if format is None else format.read_values(directory)

    def _describe(self, directory: Path) -> tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]:
        """The name of a checkpoint's format, its values, and its tensors' shapes."""
        format = recognize(directory, self._formats.values())
        if format is None:
            raise CheckpointError(f"{directory} isn't of a known format ({', '.join(self._formats)})")
        shapes = {name: tuple(shape) for name, shape in format.names(directory).items()}
        return format.name, format.read_values(directory), shapes

    def _restore_one(
        self,
        directory: Path,
        pieces: list[Piece],
        optional: tuple[str, ...],
        required: tuple[str, ...],
    ) -> Restored | str:
        """Fill the pieces from `directory`, or return why it can't be used; equal on all ranks."""
        try:
            # Read once and broadcast: the ranks must decide from the same values and names.
            format_name, values, shapes = share(self._group, lambda: self._describe(directory))
        except (CheckpointError, OSError) as error:
            return reason(error)
        lacking = [key for key in required if key not in values]
        if lacking:
            raise CheckpointError(
                f"checkpoint {directory} holds weights only, so training cannot continue from it (it lacks "
                f'{", ".join(lacking)}); to start from its weights, set [model] weights = "{directory}"'
            )
        needed = {piece.name: piece.shape for piece in pieces if not piece.name.startswith(optional)}
        stored = {name: shape for name, shape in shapes.items() if not name.startswith(optional)}
        differences = describe_differences(self._group, needed, stored)
        if differences is not None:
            raise CheckpointError(f"checkpoint {directory} is of another model or optimizer: {differences}")
        present = [piece for piece in pieces if piece.name in needed or shapes.get(piece.name) == tuple(piece.shape)]
        fault = survey(self._group, lambda: self._formats[format_name].load(directory, present))
        if isinstance(fault, CheckpointError | OSError):
            return reason(fault)
        if isinstance(fault, Exception):
            raise fault
        step = values.get("step")
        if type(step) is not int or not 0 <= step < 2**63:  # no isinstance: True is an int
            return f"{directory}: its values have no step, expected a number that is zero or more"
        names = {piece.name for piece in present}
        self._warn_of_unused(directory, names, [name for name in shapes if name not in stored])
        return Restored(step, directory, values, [piece.name for piece in pieces if piece.name not in names])

    def _warn_of_unused(self, directory: Path, used: set[str], optional: list[str]) -> None:
        """Warn about tensors of the checkpoint that this run doesn't use, counted by prefix; collective."""
        counts = Counter(name.rpartition("/")[0] for name in not_wanted(self._group, used, optional))
        if counts and self._group.rank() == 0:
            listed = ", ".join(f"{prefix} ({count})" for prefix, count in counts.items())
            LOG.warning("checkpoint %s has tensors that this run doesn't use: %s", directory.name, listed)


def _check_there(directory: Path, rank: int) -> None:
    """Raise CheckpointError where a rank doesn't find `directory`: a format may create it, and the rank's files would be lost."""
    if not directory.is_dir():
        raise CheckpointError(
            f"rank {rank} on node {socket.gethostname()} does not find {directory}, which rank 0 made; expected it on a file "
            "system that all nodes share: choose such a [job] output_dir"
        )


def _give_way() -> None:
    """Give this thread only the processor time that training leaves: all of an idle core, hardly any of a busy one.

    At normal priority a step beside it takes twice as long. It can't starve: when training waits for the save, a core is idle.
    """
    if sys.platform == "linux":  # where each thread has its own scheduling policy
        with suppress(OSError):  # some containers forbid it
            os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
