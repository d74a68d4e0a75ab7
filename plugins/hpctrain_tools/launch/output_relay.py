"""Passes a launcher's output on: a launcher that cannot write, on a full disk for instance, would end its ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Protocol

from hpctrain_tools.launch.channel_streams import Heard, Listener

_CHUNK = 2**16
_RULE = b"-" * 74 + b"\n"
# A longer text between two rules is no message of Open MPI's
_LONGEST = 2**12
_ENDINGS = (b"MPI_ABORT was invoked", b'calling\n"abort"', b"exited with non-zero status")
_BANNER, _BANNER_END = b"=" * 83 + b"\n=   BAD TERMINATION", b"debugging suggestions\n"
# seconds for the remaining output after the launcher has ended
_LEFT = 5.0


class Filter(Protocol):
    """Leaves something out of a stream. take: what of a chunk can be passed on; rest: what is held at the end."""

    def take(self, chunk: bytes) -> bytes: ...

    def rest(self) -> bytes: ...


class Relay:
    """Reads the launcher's pipes from its start on. Drops output that cannot be written (full disk, closed pipe), and Open MPI's
    messages about ranks that have ended with an error code: the ranks have printed the reason."""

    def __init__(
        self, launcher: subprocess.Popen[bytes], heard: Heard | None = None, ends: Filter | None = None
    ) -> None:
        """heard: gets what the ranks tell the starter, which is left out.

        ends: gets standard error, in which the ranks' ends are told; MPICH's own message about them is then left out, too.
        """
        listeners = [] if heard is None else [Listener(heard), Listener(heard)]
        assert launcher.stdout is not None and launcher.stderr is not None
        self._threads = [
            threading.Thread(target=_pass_on, args=arguments, daemon=True)
            for arguments in (
                (launcher.stdout, sys.stdout.fileno(), [*listeners[:1], *([Unbannered()] if ends else [])]),
                (launcher.stderr, sys.stderr.fileno(), [*listeners[1:], *([ends] if ends else []), Unruled()]),
            )
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Wait until all output is passed on."""
        for thread in self._threads:
            thread.join(_LEFT)


class Unruled:
    """Leaves out Open MPI's messages about ended ranks, which are between two rules of 74 dashes."""

    def __init__(self) -> None:
        self._held = b""

    def take(self, chunk: bytes) -> bytes:
        """Return what can be passed on. Anything from an unfinished rule or message on is held."""
        text, out = self._held + chunk, b""
        while (begin := text.find(_RULE)) >= 0:
            end = text.find(_RULE, begin + len(_RULE))
            out, text = out + text[:begin], text[begin:]
            if end < 0 and len(text) < _LONGEST:
                self._held = text
                return out
            message = text[: end - begin + len(_RULE)] if end >= 0 else text
            text = text[len(message) :]
            out += b"" if any(ending in message for ending in _ENDINGS) else message
        complete = text.rstrip(b"-") if len(text) - len(text.rstrip(b"-")) < len(_RULE) else text
        self._held = text[len(complete) :]
        return out + complete

    def rest(self) -> bytes:
        """Return what is held at the end."""
        return self._held


class Unbannered:
    """Leaves out MPICH's message about an ended rank. It names a process, and often one that MPICH itself has killed."""

    def __init__(self) -> None:
        self._held = b""

    def take(self, chunk: bytes) -> bytes:
        """Return what can be passed on. Anything from a rule of `=` on is held, until it is clear whether the message follows."""
        text, out = self._held + chunk, b""
        while (begin := text.find(_BANNER[:1])) >= 0:
            out, text = out + text[:begin], text[begin:]
            if len(text) < len(_BANNER) and _BANNER.startswith(text):
                break
            end = text.find(_BANNER_END)
            if text.startswith(_BANNER) and end < 0 and len(text) < _LONGEST:
                break
            cut = end + len(_BANNER_END) if text.startswith(_BANNER) and end >= 0 else 0
            keep = 0 if cut else 1
            out, text = out + text[:keep], text[cut or keep :]
        else:
            out, text = out + text, b""
        self._held = text
        return out

    def rest(self) -> bytes:
        """Return what is held at the end."""
        return self._held


def _pass_on(source: IO[bytes], into: int, filters: Sequence[Filter]) -> None:
    while chunk := os.read(source.fileno(), _CHUNK):
        for one in filters:
            chunk = one.take(chunk)
        _write(chunk, into)
    left = b""
    for one in filters:
        left = one.take(left) + one.rest()
    _write(left, into)


def _write(chunk: bytes, into: int) -> None:
    with suppress(OSError):
        while chunk:
            chunk = chunk[os.write(into, chunk) :]
