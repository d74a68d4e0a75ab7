"""Finds the checkpoint at a path, its format, and the checkpoints of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hpctrain.base.errors import CheckpointError, UsageError
from hpctrain.checkpoint.directory import CheckpointDirectory, behind_name
from hpctrain.checkpoint.state import SOURCE
from hpctrain.contracts.checkpoint import CheckpointFormat


@dataclass(frozen=True)
class Checkpoint:
    """A directory and the format that recognizes it."""

    path: Path
    format: CheckpointFormat


def find_checkpoint(path: Path, formats: Sequence[CheckpointFormat]) -> Checkpoint:
    """The checkpoint at `path`. UsageError if there is none; for a run's directory it names the run's checkpoints."""
    if not path.exists():
        raise UsageError(f"there is no checkpoint {path}")
    format = recognize(path, formats)
    if format is None:
        known = ", ".join(one.name for one in formats)
        raise UsageError(f"{path} isn't a checkpoint of a known format ({known}){hint_of(path)}")
    return Checkpoint(path, format)


def hint_of(path: Path) -> str:
    """The end of an error about `path`: the checkpoints of the run, if `path` is a run; else empty."""
    run = root_of(path)
    return "" if run is None else f"; this run has {', '.join(str(one) for one in run.candidates()[:3])}"


def recognize(path: Path, formats: Iterable[CheckpointFormat]) -> CheckpointFormat | None:
    """The first of `formats` that recognizes the directory `path`."""
    return next((one for one in formats if one.recognizes(path)), None) if path.is_dir() else None


def refuse_other_source(path: Path, formats: Sequence[CheckpointFormat], source: str) -> None:
    """Raises CheckpointError for a checkpoint that was saved beside other given values than those of `source`."""
    path = behind_name(path)
    format = recognize(path, formats)
    saved = format.read_values(path).get(SOURCE, "") if format is not None else ""
    if saved and saved != source:
        raise CheckpointError(
            f"{path} was saved without the model's frozen values, which were others than now (fingerprint {saved}, found "
            f"{source or 'none'}): give the model the files, the configuration and the seed that it had then"
        )


def root_of(run: Path) -> CheckpointDirectory | None:
    """The directory of a run's checkpoints; `run` is that directory or the run's output_dir. None if it has none."""
    for root in (run / "checkpoints", run):
        directory = CheckpointDirectory(root)
        if directory.candidates():
            return directory
    return None


def memory_for(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for the tensor `name`; CheckpointError if it is too large, since a crafted file can claim any shape."""
    try:
        return torch.empty(tuple(shape), dtype=dtype)
    except (RuntimeError, TypeError) as error:  # torch raises these when memory is too small or the size is too large
        raise CheckpointError(f"{list(shape)} values of the tensor {name} ({dtype}) don't fit into memory") from error
