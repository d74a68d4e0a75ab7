"""A full screen of a terminal, which is as it was when the view ends, however it ends."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

# takes the terminal's other screen, without a cursor
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[2J"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class Screen:
    """Draws frames and waits for keys, in a `with`. Ctrl-C raises KeyboardInterrupt; Ctrl-Z gives the terminal back meanwhile."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, force_terminal=True)
        self._keys = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._modes: list[Any] = []
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Screen:
        self._waking, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakes_before = signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        for number in _ENDING:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._handlers[number] = signal.signal(number, _end)
        self._handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: None)
        self._handlers[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, self._suspend)
        self._take()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal may be gone
            self._give_back()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakes_before)
        os.close(self._waking)
        os.close(self._wakes)

    @property
    def size(self) -> tuple[int, int]:
        """Columns and lines."""
        found = os.get_terminal_size(sys.stdout.fileno())
        return found.columns or 80, found.lines or 24

    @property
    def ascii_only(self) -> bool:
        """Whether the terminal has no other characters."""
        return self._console.options.ascii_only

    def draw(self, lines: Sequence[Text]) -> None:
        """Show the lines, as many as the terminal has."""
        columns, height = self.size
        shown = ""
        for number in range(height):
            line = lines[number] if number < len(lines) else Text("")
            with self._console.capture() as captured:
                self._console.print(line, width=columns, no_wrap=True, overflow="crop", end="")
            rest = "\x1b[K" if line.cell_len < columns else ""  # behind a full line it would erase the last character
            shown += f"\x1b[{number + 1};1H{captured.get()}{rest}"
        _put(shown)

    def wait(self, seconds: float) -> str:
        """Keys that were typed; "" if the time is over or the size has changed, "q" if the keyboard is gone."""
        watched = [self._waking, *([] if self._keys is None else [self._keys])]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._waking in ready:
            os.read(self._waking, 1024)
        if self._keys is None or self._keys not in ready:
            return ""
        return os.read(self._keys, 1024).decode(errors="replace") or "q"

    def _take(self) -> None:
        if self._keys is not None:
            self._modes = termios.tcgetattr(self._keys)
            tty.setcbreak(self._keys)
        _put(_ENTER)

    def _give_back(self) -> None:
        _put(_LEAVE)
        if self._keys is not None:
            termios.tcsetattr(self._keys, termios.TCSAFLUSH, self._modes)

    def _suspend(self, *_: object) -> None:
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # goes on here with SIGCONT
        signal.signal(signal.SIGTSTP, self._suspend)
        self._take()


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
