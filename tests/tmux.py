"""A terminal of any size, in tmux: what a program draws there, and what it leaves behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launching import wait_until
from packages import need_commands

_COLOURED = re.compile("\x1b\\[[0-9;]*\\b(?:3[0-8]|4[0-8]|9[0-7])[0-9;]*m")


class Terminal:
    """A pane with a shell, in a server of tmux of its own."""

    def __init__(self, columns: int, lines: int, cwd: Path, env: dict[str, str]) -> None:
        self._name = f"hpctrain-{uuid.uuid4().hex[:12]}"
        settings = {"LC_ALL": "C.UTF-8", "PS1": "$ ", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **env}
        variables = [word for name, value in settings.items() for word in ("-e", f"{name}={value}")]
        size = ["-x", str(columns), "-y", str(lines)]
        shell = ["bash", "--norc", "--noprofile"]
        self._tmux("new-session", "-d", *size, "-c", str(cwd), *variables, *shell)
        self._tmux("set-option", "-g", "status", "off")
        wait_until(lambda: self.shown().startswith("$"), 30, "a shell")

    def close(self) -> None:
        """End it, with what runs in it."""
        self._tmux("kill-server")

    def type(self, *keys: str) -> None:
        """Type keys as tmux names them: "q", "C-c", or a text and "Enter"."""
        self._tmux("send-keys", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def shown(self, with_colours: bool = False) -> str:
        """The screen's lines."""
        return self._tmux("capture-pane", "-p", *(["-e"] if with_colours else []))

    @property
    def is_coloured(self) -> bool:
        """Whether any character has a colour; bold and dim are none."""
        return _COLOURED.search(self.shown(with_colours=True)) is not None

    def flags(self) -> str:
        """Whether the program has the other screen, and whether there is a cursor: "0 1" in a shell."""
        return self._tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}").strip()

    def wait_for(self, pattern: str, seconds: float = 60) -> str:
        """Wait until the screen matches; returns it."""
        screen = ""

        def found() -> bool:
            nonlocal screen
            screen = self.shown()
            return re.search(pattern, screen, re.MULTILINE) is not None

        try:
            wait_until(found, seconds, f"{pattern!r} on the screen")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{screen}") from None
        return screen

    def _tmux(self, *words: str) -> str:
        left_out = ("TMUX", "NO_COLOR", "COLUMNS", "LINES")
        own = {name: value for name, value in os.environ.items() if name not in left_out}
        own["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"  # `python` is that of the tests
        done = subprocess.run(
            ["tmux", "-u", "-L", self._name, "-f", "/dev/null", *words],
            env=own, check=True, capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        return done.stdout


@contextmanager
def terminal(columns: int, lines: int, cwd: Path, env: dict[str, str] | None = None) -> Iterator[Terminal]:
    """A terminal with a shell; ends with what runs in it."""
    need_commands("tmux")
    one = Terminal(columns, lines, cwd, env or {})
    try:
        yield one
    finally:
        one.close()
