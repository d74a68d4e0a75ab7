"""`tokens`: prepared ids in a memory-mapped .npy or .bin file, or in HDF5."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np

from hpctrain.api import Dataset, DatasetContext, Field, Options, Samples, Split, UsageError, hookimpl
from hpctrain_plugins.dataset.documents import document_sizes, open_documents
from hpctrain_plugins.dataset.windows import largest, open_split


class TokensOptions(Options):
    path: Path = Field(description="a .npy file, an .h5/.hdf5 file, or a raw .bin file")
    dtype: Literal["uint8", "uint16", "int32", "uint32", "int64"] = Field(
        default="uint16", description="dtype of a .bin file"
    )
    key: str = Field(default="tokens", description="name of the dataset in an HDF5 file")
    end_of_text: int | None = Field(
        default=None,
        ge=0,
        description="the id that ends a document: each document is a sample of its own length, for [batch] tokens (cut if longer "
        "than seq_length)",
    )
    validation_path: Path | None = Field(default=None, description="a separate file for validation")
    validation_fraction: float = Field(default=0.0, ge=0, lt=1, description="share of `path` kept for validation")


class Tokens(Dataset):
    """Token ids in a file that is not read into memory."""

    name = "tokens"
    Options = TokensOptions
    options: TokensOptions

    def open(self, split: Split, context: DatasetContext) -> Samples | None:
        own = self.options.validation_path
        if own is None:
            tokens, vocab = self._training
            return self._samples(tokens, split, self.options.validation_fraction, context, vocab, self.options.path)
        path = self.options.path if split == "train" else own
        tokens = self._map(path)
        # with two files, each file is one split
        return self._samples(tokens, "train", 0.0, context, largest(tokens) + 1, path)

    def _samples(
        self, tokens: Any, split: Split, fraction: float, context: DatasetContext, vocab: int, path: Path
    ) -> Samples | None:
        if self.options.end_of_text is None:
            return open_split(tokens, split, fraction, context, vocab, str(path))
        is_whole = path == self.options.path
        sizes = self._sizes if is_whole else document_sizes(tokens, self.options.end_of_text)
        if len(sizes) == 1:
            raise UsageError(f"[dataset] end_of_text: {path} has no documents that end with {self.options.end_of_text}")
        return open_documents(tokens, sizes, split, fraction, context, vocab, str(path))

    @cached_property
    def _training(self) -> tuple[Any, int]:
        """The training tokens and the vocabulary size. Reads all ids once, so that an id too large for the model fails now."""
        tokens = self._map(self.options.path)
        return tokens, largest(tokens) + 1

    @cached_property
    def _sizes(self) -> Any:
        """Tokens of each document, for all splits of the file."""
        assert self.options.end_of_text is not None
        return document_sizes(self._training[0], self.options.end_of_text)

    def _map(self, path: Path) -> Any:
        try:
            tokens = self._open_file(path)
        except FileNotFoundError:
            raise UsageError(f"[dataset] path: there is no file {path}") from None
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(f"[dataset] path: {path} cannot be read as tokens: {error}") from None
        if len(tokens.shape) != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise UsageError(
                f"[dataset] path: {path} holds {tokens.dtype} of shape {tokens.shape}, expected a row of integers"
            )
        return tokens

    def _open_file(self, path: Path) -> Any:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        if path.suffix in (".h5", ".hdf5"):
            return _Hdf5Row(h5py.File(path, "r")[self.options.key])
        return np.memmap(path, dtype=self.options.dtype, mode="r")


class _Hdf5Row:
    """A part of an HDF5 dataset that is read slice by slice; h5py would read the whole part at the first slice."""

    def __init__(self, dataset: Any, begin: int = 0, end: int | None = None) -> None:
        self._dataset, self._begin = dataset, begin
        self._end = len(dataset) if end is None else end
        self.shape, self.dtype = (self._end - begin, *dataset.shape[1:]), dataset.dtype

    def __len__(self) -> int:
        return self._end - self._begin

    def __getitem__(self, part: slice) -> Any:
        begin, end, _ = part.indices(len(self))
        if part.stop is None or part.start is None:  # a split: nothing is read yet
            return _Hdf5Row(self._dataset, self._begin + begin, self._begin + end)
        return self._dataset[self._begin + begin : self._begin + end]


@hookimpl
def hpctrain_dataset() -> list[type[Dataset]]:
    return [Tokens]
