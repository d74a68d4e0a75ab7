"""The table [launcher.NAME]: what every launcher is told."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from hpctrain.job.table import SlotTable, error_of_several_keys, seconds_of


def _time(text: str) -> str:
    seconds_of(text)
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/") or not text.isprintable():
        raise ValueError(f"expected an absolute path such as /tmp, found {text!r}")
    return text


class LauncherTable(SlotTable):
    """[launcher.NAME]"""

    nodes: int = Field(default=1, ge=1)
    """Nodes to ask for."""
    ranks_per_node: int = Field(default=1, ge=1)
    """Ranks on each node: one per GPU, or without GPUs one per socket or per few cores."""
    cpus_per_rank: int | None = Field(default=None, ge=1)
    """Cores of each rank (default: the site's)."""
    time: Annotated[str, AfterValidator(_time)] | None = None
    """Time limit of one start of the job, such as "24h", or as in Slurm "90" (minutes) or "1-12:00:00" (default: the site's)."""
    save_seconds: int = Field(default=120, ge=1)
    """How long before the time limit the ranks are told to finish their step and save."""
    stage: bool = False
    """Pack this Python environment once, and unpack it on each node's own disk before the ranks start."""
    stage_directory: Annotated[str, AfterValidator(_absolute)] = "/tmp"
    """A directory on each node's own disk."""

    @property
    def seconds(self) -> int | None:
        """`time` in seconds."""
        return None if self.time is None else seconds_of(self.time)

    @model_validator(mode="after")
    def _leaves_time_to_train(self) -> LauncherTable:
        if self.seconds is not None and self.seconds <= self.save_seconds:
            raise error_of_several_keys(
                f"expected time > save_seconds, found time = {self.time} and save_seconds = {self.save_seconds}"
            )
        return self
