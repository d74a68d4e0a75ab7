"""Finds the checkpoint at a path, its format, and the checkpoints of a run; compares its tensors with those that ranks ask for."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from hpctrain.base.errors import CheckpointError, UsageError
from hpctrain.checkpoint.directory import CheckpointDirectory, behind_name
from hpctrain.checkpoint.state import SOURCE
from hpctrain.contracts.checkpoint import CheckpointFormat
from hpctrain.ranks.json_collectives import survey


def format_of(path: Path, formats: Sequence[CheckpointFormat]) -> CheckpointFormat:
    """The format of the checkpoint at `path`. UsageError if there is none; for a run's directory it names the run's checkpoints."""
    if not path.exists():
        raise UsageError(f"there is no checkpoint {path}")
    format = recognize(path, formats)
    if format is None:
        names = ", ".join(format.name for format in formats)
        raise UsageError(f"{path} isn't a checkpoint of a known format ({names}){hint_of(path)}")
    return format


def hint_of(path: Path) -> str:
    """The end of an error about `path`: the checkpoints of the run, if `path` is a run; else empty."""
    run = root_of(path)
    return "" if run is None else f"; this run has {', '.join(map(str, run.candidates()[:3]))}"


def recognize(path: Path, formats: Iterable[CheckpointFormat]) -> CheckpointFormat | None:
    """The first of `formats` that recognizes the directory `path`."""
    return next((format for format in formats if format.recognizes(path)), None) if path.is_dir() else None


def refuse_other_source(path: Path, formats: Sequence[CheckpointFormat], source: str) -> None:
    """Raise CheckpointError for a checkpoint whose frozen values, which it leaves out, are not those of `source`."""
    path = behind_name(path)
    format = recognize(path, formats)
    saved = format.read_values(path).get(SOURCE, "") if format is not None else ""
    if saved and saved != source:  # without a source it holds all values
        raise CheckpointError(
            f"{path} was saved without the model's frozen values, which were others than now (fingerprint {saved}, found "
            f"{source or 'none'}): give the model the files, the configuration and the seed that it had then"
        )


def root_of(run: Path) -> CheckpointDirectory | None:
    """The directory of a run's checkpoints; `run` is that directory or the run's output_dir. None if there are none."""
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


def describe_differences(
    group: dist.ProcessGroup, wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]]
) -> str | None:
    """The differences between the tensors that all ranks together ask for and those of a file; None if there are none.

    `wanted` is this rank's part; `stored` must be equal on all ranks. Collective.
    """
    missing = [f"{name} isn't there" for name in wanted if name not in stored]
    reshaped = [
        f"{name} is {list(stored[name])}, expected {list(shape)}"
        for name, shape in wanted.items()
        if name in stored and tuple(stored[name]) != tuple(shape)
    ]
    # collective: before anything that a rank may raise
    unused = [f"{name} isn't in the model" for name in not_wanted(group, wanted, stored)]

    def check() -> None:
        if missing or reshaped:
            raise CheckpointError(_first_few([*missing, *reshaped]))

    outcome = survey(group, check)  # one rank's difference is the answer on all
    if isinstance(outcome, Exception):
        return str(outcome)
    return _first_few(unused) if unused else None  # equal on all ranks


def not_wanted(group: dist.ProcessGroup, wanted: Collection[str], stored: Iterable[str]) -> list[str]:
    """The names in `stored` that no rank wants; `stored` must be equal on all ranks. Collective; sends a byte per name."""
    names = list(stored)
    used = torch.tensor([name in wanted for name in names], dtype=torch.uint8)
    if names:
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    return [name for name, is_used in zip(names, used.tolist(), strict=True) if not is_used]


def _first_few(sentences: list[str]) -> str:
    more = f" and {len(sentences) - 3} more" if len(sentences) > 3 else ""
    return "; ".join(sentences[:3]) + more
