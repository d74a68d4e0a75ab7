"""What users' code prints on ranks: whole lines, with the rank in front where there are several."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, TextIO

from hpctrain.contracts.identity import Identity

CLEAR_LINE = "\r\x1b[2K"
"""Moves a terminal's cursor to the beginning of its line, and empties the line: a progress bar may be there."""


class Labelled(io.TextIOBase):
    """Passes text on to `inner` by whole lines, each with `label` in front and written at once.

    The only rank on a terminal, whose label is CLEAR_LINE, passes flushed text on as it comes: a prompt must not wait for its line.
    """

    bar: ClassVar[str] = ""
    """The progress bar of this process, which is drawn again behind each line."""

    def __init__(self, inner: TextIO, label: str) -> None:
        self.inner, self.label = inner, label
        self._held, self._label = "", label
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._held = (self._held + text).split("\n")
            # what a terminal would show of a line that was overwritten
            whole = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
            shown = "".join(f"{self.label if number else self._label}{line}\n" for number, line in enumerate(whole))
            self._pass_on(shown and shown + self.bar)
            self._label = self.label if lines else self._label
        return len(text)

    def flush(self) -> None:
        if self.label == CLEAR_LINE:
            with self._lock:
                self._pass_on(self._label + self._held if self._held else "")
                self._label, self._held = ("", "") if self._held else (self._label, "")

    def _pass_on(self, text: str) -> None:
        if text:
            with suppress(OSError):  # nobody reads it: the training goes on
                self.inner.write(text)
                self.inner.flush()

    def end(self) -> None:
        """Pass on a last line without an end."""
        if self._held:
            self.write("\n")

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self.inner.isatty()

    def fileno(self) -> int:
        return self.inner.fileno()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # encoding, errors, buffer


def own(stream: TextIO) -> TextIO:
    """The stream without labels, for hpctrain's own lines: own(sys.stdout)."""
    return stream.inner if isinstance(stream, Labelled) else stream


def tell(text: str) -> None:
    """Print hpctrain's own lines on standard error, in place of a progress bar if there is one."""
    has_bar = isinstance(sys.stderr, Labelled) and sys.stderr.label.startswith(CLEAR_LINE)
    with suppress(OSError):
        print(
            f"{CLEAR_LINE}{text}\n{Labelled.bar}" if has_bar else f"{text}\n", end="", file=own(sys.stderr), flush=True
        )


def label_of_prints() -> str | None:
    """The label of this process's prints; None if they have none."""
    return sys.stdout.label if isinstance(sys.stdout, Labelled) else None


def label_prints(label: str) -> None:
    """From now on in this process, what is printed comes by whole lines with `label` in front."""
    sys.stdout, sys.stderr = Labelled(sys.stdout, label), Labelled(sys.stderr, label)


@contextmanager
def labelled_prints(identity: Identity, terminal: bool) -> Iterator[None]:
    """Label what is printed inside. terminal: whether a terminal shows the output, and with it a progress bar."""
    label = f"[rank {identity.rank}] " if identity.size > 1 else ""
    if not (label or terminal):
        yield
        return
    before = sys.stdout, sys.stderr
    label_prints((CLEAR_LINE if terminal else "") + label)
    mine = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for stream in mine:
            if isinstance(stream, Labelled):
                stream.end()
        sys.stdout, sys.stderr = before
        Labelled.bar = ""
