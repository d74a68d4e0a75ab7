"""The user's text files."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from hpctrain.api import UsageError


class Corpus:
    """The files that match some patterns, as texts: a text for each file, or for each line that is not blank."""

    def __init__(self, patterns: Sequence[str], by_line: bool) -> None:
        self._patterns, self.by_line = patterns, by_line

    @cached_property
    def paths(self) -> list[Path]:
        """Every file once, in a fixed order. Raises UsageError for a pattern that matches nothing."""
        paths: dict[Path, None] = {}
        for pattern in self._patterns:
            found = sorted(p for p in glob.glob(pattern, recursive=True) if Path(p).is_file())
            if not found:
                raise UsageError(f"[dataset] files: nothing matches {pattern!r} (relative to {Path.cwd()})")
            paths.update(dict.fromkeys(map(Path, found)))
        return list(paths)

    def contents(self) -> Iterator[bytes]:
        """Yield the content of each file. Raises UsageError if one can't be read."""
        for path in self.paths:
            try:
                content = path.read_bytes()
            except OSError as error:
                raise UsageError(f"[dataset] files: {path} cannot be read: {error.strerror}") from None
            yield content

    def texts(self, content: bytes) -> list[bytes]:
        """The texts of one file. A line has its line end, from which a model learns to stop."""
        if not self.by_line:
            return [content]
        return [line for line in content.splitlines(keepends=True) if line.strip()]

    @cached_property
    def sizes(self) -> list[int]:
        """Bytes of each file."""
        try:
            return [os.stat(path).st_size for path in self.paths]
        except OSError as error:
            raise UsageError(f"[dataset] files: {error.filename} cannot be read: {error.strerror}") from None

    def excerpts(self, number: int, length: int) -> Iterator[bytes]:
        """`number` parts of at most `length` bytes, spread evenly over all files."""
        ends = np.cumsum(self.sizes)
        for place in np.linspace(0, ends[-1], number, endpoint=False).astype(np.int64):
            file = int(np.searchsorted(ends, place, side="right"))
            try:
                with open(self.paths[file], "rb") as opened:
                    opened.seek(int(place) - (int(ends[file]) - self.sizes[file]))
                    yield opened.read(length)
            except OSError as error:
                raise UsageError(f"[dataset] files: {self.paths[file]} cannot be read: {error.strerror}") from None
