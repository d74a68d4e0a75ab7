"""Measures how fast a format writes and reads on the ranks of this job, against plain files and other libraries."""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hpctrain.api import CheckpointFormat, Piece
from hpctrain_tools.bench import spread
from hpctrain_tools.bench.checkpoint_methods import FileSystemWriter, Format, Method, PlainFile, TorchSave

COLUMNS = 2048
TENSOR_BYTES = 32 * 2**20


@dataclass(frozen=True)
class CheckpointTiming:
    """A measurement: the median over the rounds, of the slowest rank, and the quartiles below and above it.

    nbytes: bytes of the values over all ranks. ratio: speed relative to plain files in the same round.
    """

    operation: str
    method: str
    nbytes: int
    seconds: float
    low: float
    high: float
    ratio: float


def make_state(nbytes: int, rank: int, ranks: int) -> list[Piece]:
    """This rank's rows of float32 matrices of 32 MiB (smaller if `nbytes` over all ranks is)."""
    count = max(1, round(nbytes / TENSOR_BYTES))
    rows = max(1, nbytes // count // 4 // COLUMNS // ranks)
    generator = torch.Generator().manual_seed(rank)
    return [
        Piece(
            f"model/layers.{number}.weight", (rows * ranks, COLUMNS), (rows * rank, 0),
            torch.randn(rows, COLUMNS, generator=generator),
        )
        for number in range(count)
    ]  # fmt: skip


def measure(format: CheckpointFormat, nbytes: int, directory: Path, rounds: int) -> list[CheckpointTiming]:
    """Collective over the world. Methods take turns, so that a busy machine affects all alike. Caches are emptied before
    each read where the file system allows it (not on tmpfs)."""
    pieces = make_state(nbytes, dist.get_rank(), dist.get_world_size())
    methods: list[Method] = [
        kind(name, pieces, directory / name)
        for name, kind in (("plain", PlainFile), ("torch.save", TorchSave), ("DCP", FileSystemWriter))
    ]
    taken = {method.name for method in methods}
    name = f"format {format.name}" if format.name in taken else format.name
    methods.insert(1, Format(format, name, pieces, directory / name))
    times: dict[tuple[str, str], list[float]] = {}
    total = _total(sum(piece.tensor.nbytes for piece in pieces))
    for _ in range(rounds + 1):
        for method in methods:
            _one_round(method, times)
    return [
        _timing(operation, name, total, found, times[operation, "plain"]) for (operation, name), found in times.items()
    ]


def _timing(operation: str, method: str, nbytes: int, found: list[float], reference: list[float]) -> CheckpointTiming:
    """The measurement without the first round, which warms up caches and imports."""
    ratios = [one / other for one, other in zip(reference[1:], found[1:], strict=True)]
    return CheckpointTiming(operation, method, nbytes, *spread(found[1:]), statistics.median(ratios))


def _one_round(method: Method, times: dict[tuple[str, str], list[float]]) -> None:
    if dist.get_rank() == 0:
        method.root.mkdir(parents=True)
    times.setdefault(("write", method.name), []).append(_timed(method.write))
    _forget(method.root)
    for tensor in method.target.values():
        tensor.zero_()
    times.setdefault(("read", method.name), []).append(_timed(method.read))
    assert all(torch.equal(method.target[name], tensor) for name, tensor in method.tensors.items())
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(method.root)


def _timed(action: Callable[[], object]) -> float:
    """Seconds from the common start until the last rank has finished."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def _total(nbytes: int) -> int:
    total = torch.tensor(nbytes)
    dist.all_reduce(total)
    return int(total)


def _forget(root: Path) -> None:
    """Drop the files' pages from the cache."""
    dist.barrier()
    for path in root.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
