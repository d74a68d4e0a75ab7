"""Writes a model's outputs for every sample of a split into one array."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpctrain.base.errors import UsageError, reason
from hpctrain.contracts.model import Batch, ContextParallelModel
from hpctrain.contracts.runner import MicroBatch
from hpctrain.data.loader import Loader
from hpctrain.job.parts import Parts
from hpctrain.ranks.json_collectives import gather_values, share, together, world_group
from hpctrain.training.trained_model import TrainedModel


def refuse_outputs(parts: Parts, padded: bool, is_stream: bool) -> None:
    """UsageError for outputs that don't go into one array; equal on all ranks."""
    if is_stream:
        raise UsageError(
            "predict writes a row for each sample, and a stream has an unknown number; use samples by index"
        )
    if padded:
        why = "predict writes one shape for all samples; use [batch] global_size and micro_size"
        raise UsageError(why)
    cutting = [name for name, axis in parts.parallelism.items() if axis.traits.cuts_samples]
    if cutting and not isinstance(parts.model, ContextParallelModel):
        raise UsageError(f"predict can't put outputs together that {cutting[0]} cuts; leave it out")


def predict(model: TrainedModel, loader: Loader, outputs: Outputs, out: Path) -> dict[str, Any]:
    group = world_group()
    share(group, lambda: _begin(out))
    model.runner.evaluate(outputs.noting(loader), outputs.see)
    together(group, outputs.close)
    everyone: list[tuple[list[int], str] | None] = gather_values(outputs.form)
    share(group, lambda: os.replace(_unfinished(out), out))
    shape, dtype = next(form for form in everyone if form is not None)
    return {"shape": shape, "dtype": dtype}


def _unfinished(out: Path) -> Path:
    return out.with_name(f".{out.name}.tmp")


def _begin(out: Path) -> None:
    """UsageError if the file can't be written; what an earlier attempt left is gone."""
    try:
        with suppress(FileNotFoundError):
            _unfinished(out).unlink()
        _unfinished(out).touch()
    except OSError as error:
        raise UsageError(f"--out {out} can't be written: {reason(error)}") from None


class Outputs:
    """Writes this rank's outputs into the array of all, a .npy file that the ranks share, in the order of the samples."""

    def __init__(self, out: Path, samples: int, writes: bool, parts: Parts, cut: int) -> None:
        """writes: whether this rank does; replicas have the same. cut: over how many ranks a sample is cut."""
        self._out, self._samples, self._writes, self._parts, self._cut = out, samples, writes, parts, cut
        self._place = self._begin = 0
        self._fd: int | None = None
        self.form: tuple[list[int], str] | None = None
        """Shape and dtype of the array, once this rank has had an output."""

    def noting(self, loader: Loader) -> Iterator[MicroBatch]:
        """The micro batches; `see` is told of the outputs of the one that came last."""
        for micro in loader:
            self._place = micro.place
            yield micro

    def see(self, outputs: Any, batch: Batch) -> None:
        logits = self._parts.model.logits(outputs)
        whole = logits.full_tensor() if isinstance(logits, DTensor) else logits
        rows = len(self._parts.model.target(batch))
        if whole.dim() == 0 or len(whole) != rows:
            raise UsageError(
                f"predict writes a row for each sample; the model {self._parts.model.name!r} returned the shape "
                f"{tuple(whole.shape)} for {rows} samples, expected one tensor ({rows}, ...)"
            )
        values = whole.detach().cpu().contiguous()
        array = (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values).numpy()
        columns = batch["positions"].cpu().numpy() if self._cut > 1 else None
        shape = array.shape if columns is None else (rows, len(columns) * self._cut, *array.shape[2:])
        if self.form is None:
            self.form = [self._samples, *shape[1:]], str(array.dtype)
            if self._writes:
                self._open((self._samples, *shape[1:]), array.dtype)
        if self._fd is not None:
            self._write(self._fd, array, columns, shape)

    def _open(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """Every rank writes the same header and the same length, so it doesn't matter who is first."""
        with open(_unfinished(self._out), "r+b") as file:
            header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(file, header)
            self._begin = file.tell()
            file.truncate(self._begin + prod(shape) * dtype.itemsize)
            self._fd = os.dup(file.fileno())

    def _write(
        self, fd: int, array: np.ndarray[Any, Any], columns: np.ndarray[Any, Any] | None, shape: tuple[int, ...]
    ) -> None:
        """Write at exact positions: on a file system of several nodes, mapped pages that ranks share would overwrite each other."""
        row = prod(shape[1:]) * array.itemsize
        first = self._begin + self._place * row
        if columns is None:
            _write_all(fd, array.tobytes(), first)
            return
        column = row // shape[1]
        runs = np.split(np.arange(len(columns)), np.flatnonzero(np.diff(columns) != 1) + 1)
        for number, values in enumerate(array):
            for run in runs:
                at = first + number * row + int(columns[run[0]]) * column
                _write_all(fd, values[run[0] : run[-1] + 1].tobytes(), at)

    def close(self) -> None:
        """This rank's part is on disk."""
        if self._fd is not None:
            os.fsync(self._fd)
            os.close(self._fd)
            self._fd = None


def _write_all(fd: int, content: bytes, at: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, at)
        view, at = view[written:], at + written
