"""Files and directories that are whole or not there: under a temporary name until then."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from hpctrain.base.errors import UsageError, WriteError
from hpctrain.base.safe_files import sync_directory, temporary_name
from hpctrain.base.torch_groups import HashStore


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's errors in the block into a WriteError about `path`."""
    try:
        yield
    except OSError as error:
        raise WriteError(f"{path} could not be written: {error.strerror or error}") from error


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a new directory. At the end it is renamed to `path`; on an exception it is removed."""
    temporary = name_until_whole(path, "directory")
    temporary.mkdir()
    try:
        yield temporary
        sync_directory(temporary)
        temporary.rename(path)
        sync_directory(path.absolute().parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def name_until_whole(path: Path, kind: str) -> Path:
    """The temporary name of `path` during writing; UsageError if `path` exists or its parent doesn't."""
    if os.path.lexists(path):
        raise UsageError(f"{path} exists already; expected a new {kind}: give another name")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent}; make it, or give another name")
    return temporary_name(path)


@contextmanager
def alone() -> Iterator[dist.ProcessGroup]:
    """A group of this process alone: the `write` of formats is collective."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield group
    finally:
        dist.destroy_process_group()
