"""The output of users' code on ranks: whole lines, with the rank in front where there are several."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, TextIO

from hpctrain.contracts.identity import Identity

CLEAR_LINE = "\r\x1b[2K"
"""Moves a terminal's cursor to the beginning of its line, and empties the line: a progress bar may be there."""


class Labelled:
    """Passes text on to `inner` by whole lines, each with `label` in front and written at once.

    The only rank on a terminal, whose label is CLEAR_LINE, also passes flushed text on: a prompt must not wait for its line.
    """

    bar: ClassVar[str] = ""
    """The progress bar of this process, which is drawn again behind each line."""
    copy: ClassVar[Callable[[str], object] | None] = None
    """Gets each line that is passed on: a run's log. Not a logger: a user's handler may print what loggers get."""

    def __init__(self, inner: TextIO, label: str) -> None:
        self.inner, self.label = inner, label
        # the text that is not passed on yet, and whether a part of its line is
        self._held, self._begun = "", False
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._held = (self._held + text).split("\n")
            shown = ""
            for line in lines:
                visible = self._visible(line).rstrip("\r")
                shown += f"{self._label}{visible}\n"
                self._note(visible)
                self._begun = False
            self._held = self._visible(self._held)
            if shown:
                put(shown + (self.bar if self.label.startswith(CLEAR_LINE) else ""), self.inner)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            if self._held and self.label == CLEAR_LINE:
                put(self._label + self._held, self.inner)
                self._note(self._held.rstrip("\r"))
                self._held, self._begun = "", True

    @property
    def _label(self) -> str:
        return "" if self._begun else self.label

    def _visible(self, line: str) -> str:
        r"""The part that a terminal would show of a line that may have been overwritten. A last "\r" stays: "\n" may follow."""
        text = line.rstrip("\r")
        self._begun = self._begun and "\r" not in text
        return text.rpartition("\r")[2] + "\r" * line.endswith("\r")

    def _note(self, line: str) -> None:
        if line and Labelled.copy is not None:
            Labelled.copy(line)

    def end(self) -> None:
        """Pass on a last line without an end."""
        if self._held.strip():
            self.write("\n")

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # encoding, buffer, fileno and all else


def put(text: str, stream: TextIO | None) -> None:
    """Write and flush `text`, with escapes for what the stream's encoding has not.

    The training goes on where nobody reads it, and where the stream is closed (ValueError, None).
    """
    if stream is None:
        return
    with suppress(OSError, ValueError):
        try:
            stream.write(text)
        except UnicodeEncodeError:
            stream.write(text.encode(stream.encoding, "backslashreplace").decode(stream.encoding))
        stream.flush()


def own(stream: TextIO) -> TextIO:
    """The stream without labels, for hpctrain's own lines: own(sys.stdout)."""
    return stream.inner if isinstance(stream, Labelled) else stream


def tell(text: str) -> None:
    """Print hpctrain's own lines on standard error, in place of a progress bar if there is one."""
    has_bar = _label_of(sys.stderr).startswith(CLEAR_LINE)
    put(f"{CLEAR_LINE}{text}\n{Labelled.bar}" if has_bar else f"{text}\n", own(sys.stderr))


def _label_of(stream: TextIO) -> str:
    return stream.label if isinstance(stream, Labelled) else ""


def labels_of_prints() -> tuple[str, str]:
    """The labels of this process's standard output and standard error; "" for one without."""
    return _label_of(sys.stdout), _label_of(sys.stderr)


def label_prints(output: str, error: str) -> None:
    """Print by whole lines in this process from now on, with these labels in front; "" changes nothing."""
    if output and sys.stdout is not None:
        sys.stdout = Labelled(sys.stdout, output)
    if error and sys.stderr is not None:
        sys.stderr = Labelled(sys.stderr, error)


@contextmanager
def labelled_prints(identity: Identity, terminal: bool = False, error_terminal: bool = False) -> Iterator[None]:
    """Label what is printed inside. terminal: whether a terminal shows standard output, and with it a progress bar.

    error_terminal: whether a terminal shows standard error. A file gets no control sequences.
    """
    label = f"[rank {identity.rank}] " if identity.size > 1 else ""
    before = sys.stdout, sys.stderr
    label_prints(*(CLEAR_LINE * has_bar + label for has_bar in (terminal, terminal and error_terminal)))
    mine = sys.stdout, sys.stderr
    try:
        yield
    finally:
        for stream in mine:
            if isinstance(stream, Labelled):
                stream.end()
        sys.stdout, sys.stderr = before
        Labelled.bar = ""
