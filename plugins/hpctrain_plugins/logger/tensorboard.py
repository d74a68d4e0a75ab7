"""Writes the numbers of a metrics row to TensorBoard event files below output_dir/events."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.api import EXIT_ENVIRONMENT, Logger, LogWriter, Plan, Problem, hookimpl, make_directory, reading
from hpctrain_plugins.logger.rows import kept_rows, numbers


class TensorBoard(Logger):
    """TensorBoard event files in output_dir/events."""

    name = "tensorboard"

    def problems(self, plan: Plan) -> list[Problem]:
        if importlib.util.find_spec("tensorboard") is not None:
            return []
        why = "the package tensorboard is not installed; pip install 'hpctrain[tensorboard]', or leave this logger out"
        return [Problem(why, exit_code=EXIT_ENVIRONMENT)]

    def open(self, output_dir: Path, resumed_step: int) -> EventFiles:
        make_directory(output_dir / "events")
        writer = EventFiles(output_dir / "events", resumed_step)
        for row in kept_rows(output_dir, resumed_step):
            if row["step"] > writer.known:
                writer.log(row)
        return writer


class EventFiles(LogWriter):
    """A row's numbers as scalars."""

    def __init__(self, directory: Path, resumed_step: int) -> None:
        # imported here: it is an extra, and slow to import
        from torch.utils.tensorboard import SummaryWriter

        self.known = min(resumed_step, _newest_step(directory)) if resumed_step else 0
        # purge_step hides rows that an earlier attempt wrote after the checkpoint; they would appear twice
        self._writer = SummaryWriter(str(directory), purge_step=self.known + 1)

    def log(self, row: Mapping[str, Any]) -> None:
        for key, value in numbers(row).items():
            self._writer.add_scalar(key, value, row["step"])
        self._writer.flush()  # a checkpoint may follow, and a crash: the run goes on after this row

    def close(self) -> None:
        self._writer.close()


def _newest_step(directory: Path) -> int:
    """The step of the last event in the newest file; 0 without one. Only that one is parsed: all of them would take minutes."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    for path in sorted(directory.glob("events.out.tfevents.*"), reverse=True):
        newest = b""
        with reading(path) as fd, open(fd, "rb", closefd=False) as file:
            while len(head := file.read(12)) == 12:  # length, checksum, event, checksum
                content = file.read(struct.unpack("<Q", head[:8])[0])
                if len(file.read(4)) < 4:  # cut short
                    break
                newest = content
        found = Event.FromString(newest)
        if found.HasField("summary"):
            return int(found.step)
    return 0


@hookimpl
def hpctrain_logger() -> list[type[Logger]]:
    return [TensorBoard]
