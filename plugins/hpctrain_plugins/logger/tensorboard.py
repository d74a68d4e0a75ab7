"""Writes every number of a metrics row to TensorBoard event files below output_dir/events."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpctrain.api import EnvironmentUnfitError, Logger, Options, hookimpl, make_directory


class TensorBoard(Logger):
    """TensorBoard event files in output_dir/events."""

    name = "tensorboard"

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        if importlib.util.find_spec("tensorboard") is None:
            raise EnvironmentUnfitError(
                "the package tensorboard is not installed; pip install 'hpctrain[tensorboard]', or leave this logger out"
            )

    def open(self, output_dir: Path, resumed_step: int) -> None:
        # imported here: it is an extra, and slow to import
        from torch.utils.tensorboard import SummaryWriter

        make_directory(output_dir / "events")
        # rows of an earlier try that lie after the checkpoint would stand twice: purge_step hides them
        self._writer = SummaryWriter(str(output_dir / "events"), purge_step=resumed_step + 1)

    def log(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and key != "step":
                self._writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self._writer.close()


@hookimpl
def hpctrain_logger() -> list[type[Logger]]:
    return [TensorBoard]
