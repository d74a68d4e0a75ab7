"""Writes the numbers of a metrics row to TensorBoard event files below output_dir/events."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.api import EXIT_ENVIRONMENT, Logger, LogWriter, Plan, Problem, hookimpl, make_directory
from hpctrain_plugins.logger.rows import numbers


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
        return EventFiles(output_dir / "events", resumed_step)


class EventFiles(LogWriter):
    """A row's numbers as scalars."""

    def __init__(self, directory: Path, resumed_step: int) -> None:
        # imported here: it is an extra, and slow to import
        from torch.utils.tensorboard import SummaryWriter

        # purge_step hides rows that an earlier attempt wrote after the checkpoint; they would appear twice
        self._writer = SummaryWriter(str(directory), purge_step=resumed_step + 1)

    def log(self, row: Mapping[str, Any]) -> None:
        for key, value in numbers(row).items():
            self._writer.add_scalar(key, value, row["step"])
        self._writer.flush()  # a checkpoint may follow, and a crash: the run goes on after this row

    def close(self) -> None:
        self._writer.close()


@hookimpl
def hpctrain_logger() -> list[type[Logger]]:
    return [TensorBoard]
