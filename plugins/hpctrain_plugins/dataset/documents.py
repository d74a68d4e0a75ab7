"""Samples of different lengths: one for each document of a row of tokens."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from hpctrain.api import DatasetContext, Lengths, Samples, Split, UsageError

_Ints = np.ndarray[Any, np.dtype[np.int64]]


class Documents(Samples):
    """Sample i is tokens begins[i] to begins[i] + lengths[i], its labels the tokens one further."""

    def __init__(self, tokens: _Ints, begins: _Ints, lengths: Lengths, vocab_size: int, source: str) -> None:
        """tokens: all documents in a row, any integers."""
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
        """A hash of everything: it is in memory."""
        digest = hashlib.blake2b(self._source.encode(), digest_size=16)
        for array in (self._begins, self._lengths, self._tokens):
            digest.update(np.ascontiguousarray(array).astype("<i8").tobytes())
        return digest.hexdigest()


def open_documents(
    tokens: np.ndarray[Any, Any],
    sizes: _Ints,
    split: Split,
    validation_fraction: float,
    context: DatasetContext,
    vocab_size: int,
    source: str,
) -> Documents | None:
    """The first documents are for training, the last `validation_fraction` of them for validation.

    sizes: tokens of each document. A document of n tokens has n - 1 to predict: where that is more than the sequence length, it
    is cut into samples of that length and a rest, so that each token is predicted once; a document of one token is left out.
    Raises UsageError without a sequence length, or where a split holds no sample.
    """
    if context.seq_length is None:
        raise UsageError(f"{source} needs [dataset] seq_length: this model names no max_seq_length")
    if split == "validation" and validation_fraction == 0:
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


def _samples(begins: _Ints, sizes: _Ints, longest: int) -> tuple[_Ints, Lengths]:
    """Where each sample begins and how long it is, for documents that begin at `begins`."""
    predicted = np.maximum(sizes - 1, 0)
    parts = -(-predicted // longest)
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)  # of the part in its document
    offsets = number * longest
    return np.repeat(begins, parts) + offsets, np.minimum(np.repeat(predicted, parts) - offsets, longest)
