"""The hook `kernels`: what [compile] makes is kept in the user's cache, so that a start on other nodes finds it.

A home directory is often on a shared file system, where the ranks of a large job wait for each other's files, and one that fails
there ends the job. The kept files are code, so they are not in the run's directory, which may be a copy of somebody else's.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
from pathlib import Path

import torch

from hpctrain.api import Hook, Job, hookimpl
from hpctrain.base import torch_private
from hpctrain.base.errors import reason
from hpctrain.base.safe_files import cache_directory, is_only_ours, own_directory, read_all, reading, replacing
from hpctrain.ranks.json_collectives import gather_values

LOG = logging.getLogger("hpctrain")

# bytes of a file of kernels. The largest one of torch's examples has some megabytes.
_MOST = 2**32
_SUFFIX = ".kernels"
# seconds after its last save for which the kernels of a run are kept
_UNUSED = 30 * 86400


class Kernels(Hook):
    """Gives the compiler what earlier starts of the run have made, and keeps what it makes at each checkpoint."""

    name = "kernels"

    def start(self) -> _Keeper:
        return _Keeper()


class _Keeper:
    @hookimpl
    def hpctrain_job_start(self, job: Job) -> None:
        self._directory = job.output_dir
        if load_kernels(job.output_dir):
            LOG.info("compile      with the kernels that an earlier start has made")

    @hookimpl
    def hpctrain_checkpoint_saved(self) -> None:
        save_kernels(self._directory)


@hookimpl
def hpctrain_hook() -> list[type[Hook]]:
    return [Kernels]


def load_kernels(output_dir: Path) -> int:
    """Give the compiler what earlier starts of this run have kept. Returns the number of files."""
    loaded = 0
    for path in sorted(_kept(output_dir).glob(f"*{_SUFFIX}")):
        try:
            loaded += torch_private.load_kernels(_read(path))
        except Exception as error:  # of another torch, or damaged: the compiler makes them again
            LOG.info("%s is not used: %s", path, error)
    return loaded


def save_kernels(output_dir: Path) -> None:
    """Keep what the compiler has used for this run on any rank. Collective; a failure is written into the log.

    Ranks with the same kernels, as data-parallel ones have, write one file. Files that no rank uses any more are removed.
    """
    found, me = torch.compiler.save_cache_artifacts(), torch.distributed.get_rank()
    keys = [] if found is None else sorted({key for some in found[1].artifacts.values() for key in some})
    names = gather_values(hashlib.sha256(" ".join(keys).encode()).hexdigest()[:16] + _SUFFIX if keys else "")
    directory = _kept(output_dir)
    try:
        if found is not None and names.index(names[me]) == me:
            own_directory(directory)
            if not (directory / names[me]).exists():
                with replacing(directory / names[me], 0o600) as file:  # one that others can write is not loaded
                    file.write(found[0])
        if me == 0 and any(names):
            for path in directory.glob(f"*{_SUFFIX}"):
                if path.name not in names:
                    path.unlink(missing_ok=True)
            _forget_old(directory)
    except OSError as error:
        LOG.info("the compiled kernels are not kept in %s: %s", directory, reason(error))


def _kept(output_dir: Path) -> Path:
    """The directory of a run's kernels in the user's cache."""
    run = hashlib.sha256(os.fsencode(os.path.realpath(output_dir))).hexdigest()[:16]
    return cache_directory() / "kernels" / run


def _forget_old(directory: Path) -> None:
    """Mark a run's directory as used now, and remove those of runs that have not been saved for long."""
    os.utime(directory)
    for one in directory.parent.iterdir():
        if one.stat().st_mtime < time.time() - _UNUSED:
            shutil.rmtree(one, ignore_errors=True)


def _read(path: Path) -> bytes:
    """A file's content. OSError if anybody else may have written it: it holds code."""
    with reading(path) as fd:
        if not is_only_ours(os.fstat(fd)):
            raise PermissionError("others can write it")
        return read_all(fd, path, _MOST)
