"""The common part of the subcommands of `hpctrain checkpoint`: paths, formats, tables, a progress bar on a terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hpctrain.base.errors import CheckpointError, escaped

SECONDS_BEFORE = 2.0


@contextmanager
def bytes_progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A function to call with (bytes done, bytes in total); draws on stderr."""
    console = Console(stderr=True)
    columns = (TextColumn(label), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    begin, task = time.monotonic(), bar.add_task(label)

    def advance(done: int, total: int) -> None:
        if console.is_terminal and not bar.live.is_started and time.monotonic() - begin > SECONDS_BEFORE:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()


if TYPE_CHECKING:
    from hpctrain.contracts.checkpoint import CheckpointFormat
    from hpctrain.registry.registry import Registry

PATH = click.Path(path_type=Path)


class CheckpointPath(click.Path):
    """A checkpoint's directory, or a file `latest` or `best` that names one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from hpctrain.checkpoint.directory import behind_name

        return behind_name(Path(os.fsdecode(super().convert(value, param, ctx))))


CHECKPOINT = CheckpointPath(path_type=Path)


@dataclass(frozen=True)
class Checkpoint:
    """A directory and the format that recognizes it."""

    path: Path
    format: CheckpointFormat


class Formats:
    """The installed checkpoint formats, loaded on first use: `--help` needs no torch."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules

    @cached_property
    def registry(self) -> Registry:
        """All plugins."""
        from hpctrain.registry.registry import build_registry

        return build_registry(self._modules)

    @cached_property
    def all(self) -> list[CheckpointFormat]:
        """Every format that needs no options."""
        return self.registry.instances("checkpoint")

    def make(self, name: str) -> CheckpointFormat:
        """The format `name`, with its defaults."""
        from hpctrain.contracts.checkpoint import CheckpointFormat

        cls = self.registry.find("checkpoint", name).cls
        made = self.registry.make(cls, cls.Options())
        assert isinstance(made, CheckpointFormat)  # the registry has checked it
        return made

    def find(self, path: Path) -> Checkpoint:
        """The checkpoint at `path`; UsageError when there is none."""
        from hpctrain.checkpoint.finding import format_of

        return Checkpoint(path, format_of(path, self.all))


@contextmanager
def files_of(path: Path) -> Iterator[None]:
    """Turn the operating system's error about `path` into a sentence and exit 5."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror or error}") from error


def sizes_of_files(checkpoint: Path) -> dict[str, int]:
    """The checkpoint's files and their sizes in bytes, by path within the directory."""
    found = (path for path in sorted(checkpoint.rglob("*")) if path.is_file() and not path.is_symlink())
    return {str(path.relative_to(checkpoint)): path.stat().st_size for path in found}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with columns as wide as their widest entry; nothing is cut, so that the output can be searched."""
    cells = [header, *([escaped(cell).replace("\n", " ") for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
