"""`stdlib-text`, real text on every machine with Python: the first job trains on it."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.api import Dataset, DatasetContext, Field, Options, Samples, Split, TextDataset, hookimpl
from hpctrain_plugins.dataset.windows import open_split

BYTES = 256
"""The size of the vocabulary where tokens are bytes."""


class StdlibTextOptions(Options):
    max_bytes: int = Field(default=8_000_000, ge=1, description="bytes of the library's sources to read")
    validation_fraction: float = Field(default=0.05, ge=0, lt=1, description="share of the text kept for validation")


class ByteText(TextDataset):
    """Text whose tokens are bytes of UTF-8."""

    @property
    def vocabulary(self) -> int:
        return BYTES

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


class StdlibText(ByteText):
    """The bytes of the Python standard library's sources."""

    name = "stdlib-text"
    Options = StdlibTextOptions
    options: StdlibTextOptions

    def open(self, split: Split, context: DatasetContext) -> Samples | None:
        return open_split(self._tokens, split, self.options.validation_fraction, context, BYTES, "stdlib-text")

    @cached_property
    def _tokens(self) -> np.ndarray[Any, Any]:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))
        text = bytearray()
        for file in files:
            if len(text) >= self.options.max_bytes:
                break
            if "site-packages" not in file.parts and "test" not in file.parts:
                text += file.read_bytes()
        return np.frombuffer(bytes(text[: self.options.max_bytes]), dtype=np.uint8)


@hookimpl
def hpctrain_dataset() -> list[type[Dataset]]:
    return [StdlibText]
