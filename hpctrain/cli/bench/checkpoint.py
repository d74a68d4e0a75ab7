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

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.cli.bench.checkpoint_methods import FileSystemWriter, Format, Method, PlainFile, Safetensors, TorchSave
from hpctrain.cli.bench.spread import spread
from hpctrain.contracts.checkpoint import CheckpointFormat
from hpctrain.contracts.pieces import Piece, State

COLUMNS = 2048
TENSOR_BYTES = 32 * 2**20
STEPS, STEP_PRODUCTS = 10, 10
"""Matrix products and an all-reduce stand in for a training step."""


@dataclass(frozen=True)
class CheckpointTiming:
    """A measurement: the median over the rounds, of the slowest rank, and the quartiles below and above it.

    nbytes: bytes of the values over all ranks; for a partial read, of the requested part. ratio: speed relative to a
    reference in the same round. The references: plain files for full writes and reads, the method's own full read for
    partial reads, a copy into existing memory for the time that training waits, a step without a save for one during a save.
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
        for name, kind in (
            ("plain", PlainFile), ("torch.save", TorchSave), ("DCP", FileSystemWriter), ("safetensors", Safetensors)
        )
    ]  # fmt: skip
    taken = {method.name for method in methods}
    name = f"format {format.name}" if format.name in taken else format.name
    methods.insert(1, Format(format, name, pieces, directory / name))
    times: dict[tuple[str, str], list[float]] = {}
    sizes = {"write": _total(sum(piece.tensor.nbytes for piece in pieces))}
    sizes["read"] = sizes["write"]
    for _ in range(rounds + 1):
        for method in methods:
            _one_round(method, times, sizes)
    rows = []
    for (operation, name), found in times.items():
        reference = times[operation, "plain"] if operation in ("write", "read") else times["read", name]
        rows.append(_timing(operation, name, sizes[operation], found, reference))
    return [*rows, *_measure_behind(format, pieces, directory / "behind", rounds, sizes["write"])]


def _measure_behind(
    format: CheckpointFormat, pieces: list[Piece], root: Path, rounds: int, nbytes: int
) -> list[CheckpointTiming]:
    """Background saves: how long training waits, and how much slower steps are during a save."""
    group, second = dist.group.WORLD, dist.new_group()
    assert group is not None and isinstance(second, dist.ProcessGroup)
    store = CheckpointStore(root, format, [format], 1, group, second)
    state, copies = State(pieces), [torch.empty_like(piece.tensor) for piece in pieces]
    matrix = torch.randn(512, 512)
    copied, blocked, alone, during = [list[float]() for _ in range(4)]

    def copy() -> None:
        for mine, piece in zip(copies, pieces, strict=True):
            mine.copy_(piece.tensor)

    def step() -> None:
        for _ in range(STEP_PRODUCTS):
            matrix.mul_(matrix.mm(matrix).norm().reciprocal())
        dist.all_reduce(torch.ones(1000))

    for number in range(rounds + 1):
        copied.append(_timed(copy))
        steps = [_timed(step) for _ in range(STEPS)]
        blocked.append(_timed(lambda number=number: store.save_in_background(number, state)))  # type: ignore[misc]
        behind = []
        while not store.is_over():
            behind.append(_timed(step))
        store.finish()
        alone.append(statistics.mean(steps))
        during.append(statistics.mean(behind or steps))
    rows = [
        ("copy", "plain", copied, copied),
        ("training waits", format.name, blocked, copied),
        ("step", "alone", alone, alone),
        ("step during a save", format.name, during, alone),
    ]
    return [_timing(operation, name, nbytes, found, reference) for operation, name, found, reference in rows]


def _timing(operation: str, method: str, nbytes: int, found: list[float], reference: list[float]) -> CheckpointTiming:
    """The measurement without the first round, which warms up caches and imports."""
    ratios = [one / other for one, other in zip(reference[1:], found[1:], strict=True)]
    return CheckpointTiming(operation, method, nbytes, *spread(found[1:]), statistics.median(ratios))


def _one_round(method: Method, times: dict[tuple[str, str], list[float]], sizes: dict[str, int]) -> None:
    def note(operation: str, action: Callable[[], object]) -> None:
        times.setdefault((operation, method.name), []).append(_timed(action))

    if dist.get_rank() == 0:
        method.root.mkdir(parents=True)
    note("write", method.write)
    for operation in ("read", "half the rows", "half the columns", "half of both"):
        _forget(method.root)
        if operation == "read":
            for tensor in method.target.values():
                tensor.zero_()
            note(operation, method.read)
            assert all(torch.equal(method.target[name], tensor) for name, tensor in method.tensors.items())
        elif isinstance(method, Format):
            whole, rows = slice(None), len(method.pieces[0].tensor)
            half_rows, half_columns = slice(rows // 4, rows // 4 + rows // 2), slice(COLUMNS // 4, COLUMNS * 3 // 4)
            chosen = {
                "half the rows": (half_rows, whole),
                "half the columns": (whole, half_columns),
                "half of both": (half_rows, half_columns),
            }[operation]
            asked: list[int] = []
            note(operation, lambda chosen=chosen, asked=asked: asked.append(method.read_part(*chosen)))  # type: ignore[misc]
            sizes[operation] = _total(asked[0])
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
