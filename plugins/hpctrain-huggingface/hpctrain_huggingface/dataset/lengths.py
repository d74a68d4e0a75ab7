"""The tokens of each row, for batches by tokens: counted once, by encoding every row, and kept in the cache."""

from __future__ import annotations

import logging
import os
from hashlib import sha256

import numpy as np
from datasets import Dataset

from hpctrain.api import DatasetContext, EnvironmentUnfitError, Lengths
from hpctrain.toolkit.cache import Write, kept
from hpctrain_huggingface.dataset.encoding import Encoder
from hpctrain_huggingface.dataset.options import HubDatasetOptions

LOG = logging.getLogger("hpctrain")

LOOKS = 256
"""Rows from which an estimate is made."""
_ROWS = 2**14
"""Rows whose lengths are written at once."""


def counted_lengths(
    rows: Dataset, encoder: Encoder, identity: str, options: HubDatasetOptions, context: DatasetContext
) -> Lengths | None:
    """The tokens of each row; None for samples without input_ids. Collective as `context.once_per_node` is."""
    if not len(rows) or _length(rows, encoder, 0) is None:
        return None
    name = _name(rows, identity, options, context)
    path = context.once_per_node(f"lengths {identity}", lambda: _keep(rows, encoder, name, context))
    try:
        return np.fromfile(path, "<i8", len(rows))
    except OSError as error:
        raise EnvironmentUnfitError(f"[dataset] cache: {path} cannot be read: {error.strerror}") from None


def estimated_lengths(rows: Dataset, encoder: Encoder) -> Lengths | None:
    """Lengths of some rows, repeated for all."""
    if _length(rows, encoder, 0) is None:
        return None
    looked = [_length(rows, encoder, len(rows) * look // LOOKS) for look in range(LOOKS)]
    return np.resize(np.array(looked, np.int64), len(rows))


def _length(rows: Dataset, encoder: Encoder, place: int) -> int | None:
    ids = encoder.sample(rows[place]).get("input_ids")
    return None if ids is None else len(ids)


def _name(rows: Dataset, identity: str, options: HubDatasetOptions, context: DatasetContext) -> str:
    """A digest of all that the lengths depend on: the rows' files, what was done to them, the tokenizer's files."""
    files = [one["filename"] for one in rows.cache_files]
    tokenizer = sorted(options.tokenizer.glob("*")) if options.tokenizer is not None else []
    found = sha256(repr((identity, context.seq_length, len(rows), rows._fingerprint)).encode())
    for path in (*files, *(one for one in tokenizer if one.suffix in (".json", ".jinja", ".model", ".txt"))):
        info = os.stat(path)
        found.update(repr((str(path), info.st_size, info.st_mtime_ns)).encode())
    return found.hexdigest()[:32]


def _keep(rows: Dataset, encoder: Encoder, name: str, context: DatasetContext) -> str:
    def make(write: Write) -> int:
        LOG.info("counting the tokens of %s rows, to be kept in %s", f"{len(rows):,}", context.cache)
        for begin in range(0, len(rows), _ROWS):
            part = range(begin, min(begin + _ROWS, len(rows)))
            counts = np.array([_length(rows, encoder, place) for place in part], "<i8")
            write(memoryview(counts.tobytes()))
        return len(rows)

    path, _ = kept(context.cache / "lengths", name, make)
    return str(path)
