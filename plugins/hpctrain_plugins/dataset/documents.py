"""Samples of different lengths: one for each document in a row of tokens."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hpctrain.api import DatasetContext, Lengths, Samples, Split, UsageError

_CHUNK = 1 << 22

_Ints = np.ndarray[Any, np.dtype[np.int64]]


class Documents(Samples):
    """Sample i is tokens begins[i] to begins[i] + lengths[i], its labels the same shifted by one."""

    def __init__(self, tokens: Any, begins: _Ints, lengths: Lengths, vocab_size: int, source: str) -> None:
        """tokens: all documents in a row, sliceable integers."""
        self._tokens, self._begins, self._lengths, self._source = tokens, begins, lengths, source
        self.vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._begins)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        begin, length = int(self._begins[index]), int(self._lengths[index])
        ids = torch.from_numpy(self._tokens[begin : begin + length + 1].astype(np.int64))
        return {"input_ids": ids[:-1], "labels": ids[1:]}

    def lengths(self) -> Lengths:
        return self._lengths

    def fingerprint(self) -> str:
        """A hash of everything; an estimate has no ids to hash."""
        return self._hash

    @cached_property
    def _hash(self) -> str:
        digest = hashlib.blake2b(self._source.encode(), digest_size=16)
        for array in (self._begins, self._lengths, *([] if self.is_estimate else [self._tokens])):
            for i in range(0, len(array), _CHUNK):
                digest.update(np.asarray(array[i : i + _CHUNK]).astype("<i8").tobytes())
        return digest.hexdigest()


def open_documents(
    tokens: Any,
    sizes: _Ints,
    split: Split,
    validation_fraction: float,
    context: DatasetContext,
    vocab_size: int,
    source: str,
) -> Documents | None:
    """The first documents are for training, the last `validation_fraction` of them for validation.

    sizes: tokens of each document. A document of n tokens has n - 1 tokens to predict. A document longer than the sequence
    length is cut into samples of that length and a rest, so that each token is predicted once. A document of one token is
    left out. Raises UsageError without a sequence length, or if a split has no sample.
    """
    if context.seq_length is None:
        raise UsageError(f"{source} needs [dataset] seq_length: this model names no max_seq_length")
    if split == "test" or (split == "validation" and validation_fraction == 0):
        return None
    cut = len(sizes) - round(len(sizes) * validation_fraction)
    mine = slice(0, cut) if split == "train" else slice(cut, None)
    begins, lengths = _samples((np.cumsum(sizes) - sizes)[mine], sizes[mine], context.seq_length)
    if len(begins) == 0:
        raise UsageError(
            f"{source}: its {split} split has {len(sizes[mine])} documents and none of at least 2 tokens; "
            "give more data or another validation_fraction"
        )
    return Documents(tokens, begins, lengths, vocab_size, f"{source} {split}")


def document_sizes(tokens: Any, end: int) -> _Ints:
    """Tokens of each document in a row, each up to the id `end` that closes it; read in chunks."""
    chunks = range(0, len(tokens), _CHUNK)
    ends = [begin + np.flatnonzero(np.asarray(tokens[begin : begin + _CHUNK]) == end) + 1 for begin in chunks]
    borders = np.unique(np.concatenate([[0], *ends, [len(tokens)]])).astype(np.int64)
    return np.diff(borders)


def _samples(begins: _Ints, sizes: _Ints, longest: int) -> tuple[_Ints, Lengths]:
    """The begin and length of each sample, for documents that begin at `begins`."""
    predicted = np.maximum(sizes - 1, 0)
    parts = -(-predicted // longest)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # number of the part in its document
    offsets = number * longest
    return np.repeat(begins, parts) + offsets, np.minimum(np.repeat(predicted, parts) - offsets, longest)
