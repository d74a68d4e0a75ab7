"""`stdlib-text`, real text that every machine with Python has, and `text`, files of the user."""

from __future__ import annotations

import glob
import os
import sysconfig
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hpctrain.api import (
    Dataset,
    DatasetContext,
    EnvironmentUnfitError,
    Field,
    Options,
    Samples,
    Split,
    UsageError,
    hookimpl,
)
from hpctrain_plugins.dataset.documents import open_documents
from hpctrain_plugins.dataset.windows import largest, open_split

_BYTES = 256


class StdlibTextOptions(Options):
    max_bytes: int = Field(default=8_000_000, ge=1, description="how much of the library's sources to read")
    validation_fraction: float = Field(default=0.05, ge=0, lt=1, description="share of the text kept for validation")


class StdlibText(Dataset):
    """The bytes of the Python standard library's sources."""

    name = "stdlib-text"
    Options = StdlibTextOptions
    options: StdlibTextOptions

    def open(self, split: Split, context: DatasetContext) -> Samples | None:
        fraction = self.options.validation_fraction
        return open_split(self._tokens, split, fraction, context, _BYTES, "stdlib-text")

    @cached_property
    def _tokens(self) -> np.ndarray[Any, Any]:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))
        text, size = [], 0
        for file in files:
            if size >= self.options.max_bytes:
                break
            if "site-packages" not in file.parts and "test" not in file.parts:
                text.append(file.read_bytes())
                size += len(text[-1])
        return np.frombuffer(b"".join(text)[: self.options.max_bytes], dtype=np.uint8)


class TextOptions(Options):
    files: list[str] = Field(min_length=1, description="files or glob patterns (** too), read in sorted order")
    tokenizer: Path | None = Field(default=None, description="a tokenizers file (tokenizer.json); without it, bytes")
    documents: Literal["joined", "file", "line"] = Field(
        default="joined",
        description="joined: all files are one text, cut into samples of seq_length; file, line: each is a sample of its own "
        "length, for [batch] tokens (longer ones than seq_length are cut, blank lines left out)",
    )
    validation_fraction: float = Field(
        default=0.05, ge=0, lt=1, description="share of the tokens (or documents) kept for validation"
    )


class Text(Dataset):
    """Text files, as bytes or through a tokenizer, as one text or as documents; the tokens are held in memory."""

    name = "text"
    Options = TextOptions
    options: TextOptions

    def open(self, split: Split, context: DatasetContext) -> Samples | None:
        tokens, sizes, vocab_size = self._tokens
        fraction = self.options.validation_fraction
        if self.options.documents == "joined":
            return open_split(tokens, split, fraction, context, vocab_size, "text")
        return open_documents(tokens, sizes, split, fraction, context, vocab_size, "text")

    @cached_property
    def _tokens(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
        """All ids in a row, how many each text has, and the vocabulary's size."""
        texts = [_content(path) for path in self._paths()]
        if self.options.documents == "line":  # with its end, by which a model learns to stop
            texts = [line for text in texts for line in text.splitlines(keepends=True) if line.strip()]
        if self.options.tokenizer is None:
            joint = b"\n" if self.options.documents == "joined" else b""
            return np.frombuffer(joint.join(texts), dtype=np.uint8), np.array([*map(len, texts)], np.int64), _BYTES
        tokenizer = _tokenizer(self.options.tokenizer)
        encoded = tokenizer.encode_batch([text.decode("utf-8", "replace") for text in texts])
        rows = [np.asarray(e.ids, dtype=np.int64) for e in encoded]
        ids = np.concatenate([np.zeros(0, np.int64), *rows])
        return ids, np.array([*map(len, rows)], np.int64), max(int(tokenizer.get_vocab_size()), largest(ids) + 1)

    def _paths(self) -> list[Path]:
        """Every file once, in a fixed order; a pattern that matches nothing is an error."""
        paths: dict[Path, None] = {}
        for pattern in self.options.files:
            found = sorted(p for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
            if not found:
                raise UsageError(f"[dataset] files: nothing matches {pattern!r} (relative to {Path.cwd()})")
            paths.update(dict.fromkeys(map(Path, found)))
        return list(paths)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"[dataset] files: {path} cannot be read: {error.strerror}") from None


def _tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer  # optional: only jobs with a tokenizer file need it
    except ImportError:
        raise EnvironmentUnfitError(
            "[dataset] tokenizer needs the package tokenizers, which is not installed: pip install 'hpctrain[tokenizers]'"
        ) from None
    if not os.path.isfile(path):  # unlike Path's, it takes names that are too long
        raise UsageError(f"[dataset] tokenizer: there is no file {path}")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"[dataset] tokenizer: {path} is no tokenizers file: {error}") from None


@hookimpl
def hpctrain_dataset() -> list[type[Dataset]]:
    return [StdlibText, Text]
