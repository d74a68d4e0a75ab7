"""Samples cut from one long row of tokens, shared by the text and token datasets of this folder."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from hpctrain.api import DatasetContext, Lengths, Samples, Split, UsageError

_PROBES = 64
_PROBE_TOKENS = 4096
_CHUNK = 1 << 24


class MappedRow:
    """Integers of a file that is mapped into memory, sliced as an array; worker processes get the file's name, not a copy."""

    def __init__(self, path: str, dtype: str, begin: int, end: int) -> None:
        """begin, end: the row in the file, in elements. Raises OSError if the file can't be read."""
        self._path, self._dtype, self._begin, self._end = path, np.dtype(dtype), begin, end
        place, shape = begin * self._dtype.itemsize, (end - begin,)
        # an empty file can't be mapped
        empty = begin == end
        self._row = np.zeros(0, dtype) if empty else np.memmap(path, dtype, "r", offset=place, shape=shape)

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, part: slice) -> Any:
        begin, end, _ = part.indices(len(self))
        if part.stop is None or part.start is None:  # a split
            return MappedRow(self._path, self._dtype.str, self._begin + begin, self._begin + end)
        return np.asarray(self._row[begin:end])

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedRow, (self._path, self._dtype.str, self._begin, self._end)


class TokenWindows(Samples):
    """Sample i is tokens i*seq to (i+1)*seq, its labels the same shifted by one; windows do not overlap."""

    def __init__(self, tokens: Any, seq_length: int, vocab_size: int, source: str) -> None:
        """tokens: one-dimensional integers, sliceable (numpy, memory map or HDF5)."""
        self._tokens, self._seq, self._source = tokens, seq_length, source
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._seq)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin = index * self._seq
        window = torch.from_numpy(np.asarray(self._tokens[begin : begin + self._seq + 1]).astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}

    def lengths(self) -> Lengths:
        return np.broadcast_to(np.int64(self._seq), (len(self),))

    def fingerprint(self) -> str:
        """A hash of length, window and up to 64 probes of 4096 tokens: cheap for terabytes, and detects any shift."""
        digest = hashlib.blake2b(f"{len(self._tokens)} {self._seq} {self._source}".encode(), digest_size=16)
        for begin in np.unique(np.linspace(0, max(0, len(self._tokens) - _PROBE_TOKENS), _PROBES).astype(np.int64)):
            digest.update(np.asarray(self._tokens[begin : begin + _PROBE_TOKENS]).astype("<i8").tobytes())
        return digest.hexdigest()


def open_split(
    tokens: Any, split: Split, validation_fraction: float, context: DatasetContext, vocab_size: int, source: str
) -> TokenWindows | None:
    """The first tokens are for training, the last `validation_fraction` of them for validation.

    Raises UsageError without a sequence length, or if a split has no complete sample.
    """
    if context.seq_length is None:
        raise UsageError(f"{source} needs [dataset] seq_length: this model names no max_seq_length")
    cut = len(tokens) - round(len(tokens) * validation_fraction)
    if split == "test" or (split == "validation" and validation_fraction == 0):
        return None
    part = tokens[:cut] if split == "train" else tokens[cut:]
    windows = TokenWindows(part, context.seq_length, vocab_size, f"{source} {split}")
    if len(windows) == 0:
        raise UsageError(
            f"{source}: its {split} split has {len(part)} tokens, expected at least {context.seq_length + 1} (one sample); "
            "give more data, a smaller seq_length or another validation_fraction"
        )
    return windows


def largest(tokens: Any) -> int:
    """The largest id, read in chunks."""
    chunks = (np.asarray(tokens[i : i + _CHUNK]) for i in range(0, len(tokens), _CHUNK))
    return max((int(chunk.max()) for chunk in chunks), default=-1)
