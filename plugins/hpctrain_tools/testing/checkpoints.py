"""Promises of a checkpoint format about its files: they hold what was trained, and damage is found."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.api import CheckpointError, CheckpointFormat, Piece
from hpctrain_tools.testing.kit import Kit
from hpctrain_tools.testing.record import Record


def examine_files(kit: Kit, records: Sequence[Record]) -> None:
    """Read the checkpoints of runs with the format itself; damage a file of the last one."""
    plugin = kit.made()
    assert isinstance(plugin, CheckpointFormat)
    last = None
    for record in records:
        for directory in sorted((record.directory / "out" / "checkpoints").glob("step-*[0-9]")):
            try:
                _compare(kit, plugin, record, directory)
            except (CheckpointError, OSError) as error:
                return kit.breaks("reads what it has written", f"{directory.name}: {error}")
            last = directory
    if last is not None:
        _damage(kit, plugin, record, last)
    return None


def _parameters(record: Record, directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = record.steps[int(directory.name.rpartition("-")[2])]["parameters"]
    return found


def _other(plugin: CheckpointFormat, directory: Path, parameters: Mapping[str, Tensor]) -> str:
    """A parameter that the format reads with other values than it was trained to; "" for none."""
    for name, value in parameters.items():
        read = torch.zeros_like(value)
        plugin.load(directory, [Piece(f"model/{name}", tuple(value.shape), (0,) * value.dim(), read)])
        if not torch.equal(read, value):
            return f"model/{name}"
    return ""


def _compare(kit: Kit, plugin: CheckpointFormat, record: Record, directory: Path) -> None:
    parameters = _parameters(record, directory)
    if not plugin.recognizes(directory):
        kit.breaks("recognizes its own checkpoints", f"not {directory.name}")
    faults = plugin.verify(directory)
    if faults:
        kit.breaks("finds its own checkpoints whole", faults[0])
    shapes, tensors = plugin.names(directory), plugin.tensors(directory)
    for name, value in parameters.items():
        key = f"model/{name}"
        if (
            tuple(shapes.get(key, ())) != tuple(value.shape)
            or key not in tensors
            or tensors[key].shape != tuple(value.shape)
        ):
            return kit.breaks(
                "lists each tensor with its shape", f"{key} as {shapes.get(key)}, expected {tuple(value.shape)}"
            )
    if other := _other(plugin, directory, parameters):
        kit.breaks("reads what was trained", f"{other} of {directory.name} has other values")
    return None


def _damage(kit: Kit, plugin: CheckpointFormat, record: Record, directory: Path) -> None:
    """Each file in turn loses its second half, or is missing: `verify` tells it, unless nothing that it held was needed. It tells a
    file that is none of the checkpoint's, too."""
    stranger = directory.parent / "with-a-stranger"
    shutil.copytree(directory, stranger)
    (stranger / "stranger.bin").write_bytes(b"stranger")
    if not plugin.verify(stranger):
        kit.breaks("finds damage", "verify found nothing where a file was that doesn't belong to the checkpoint")
    files = [one for one in sorted(directory.rglob("*")) if one.is_file()]
    for number, path in enumerate(files):
        for how in ("cut in half", "missing"):
            copy = directory.parent / f"damaged-{number}-{how.partition(' ')[0]}"
            shutil.copytree(directory, copy)
            damaged = copy / path.relative_to(directory)
            damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
            if how == "missing":
                damaged.unlink()
            try:
                if not plugin.verify(copy) and not _is_whole(plugin, record, directory, copy):
                    kit.breaks("finds damage", f"verify found nothing where {path.name} was {how}")
            except (CheckpointError, OSError):
                pass
            except Exception as error:
                kit.breaks(
                    "tells damage in a sentence",
                    f"verify raised {type(error).__name__} where {path.name} was {how}: {error}",
                )


def _is_whole(plugin: CheckpointFormat, record: Record, directory: Path, copy: Path) -> bool:
    """Whether a copy of a checkpoint still reads as the checkpoint itself."""
    try:
        alike = plugin.read_values(copy) == plugin.read_values(directory)
        return alike and plugin.recognizes(copy) and not _other(plugin, copy, _parameters(record, directory))
    except (CheckpointError, OSError):
        return False
