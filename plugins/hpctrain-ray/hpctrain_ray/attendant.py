"""The Ray actor beside each rank: starts it as a process of its own, passes signals on, collects its output.

The rank ends when this process does, whatever ends it: it reads the end of a pipe of the `ChannelDirectory`. Imports no torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from hpctrain.toolkit.starting import ChannelDirectory, Ending, RankNumbers, ending_in, started_variables
from hpctrain_ray.private_directories import make_private_directory
from hpctrain_ray.seats import Place, own_place

_DRAIN = 1.0
"""Seconds for the rest of an ended rank's output: a process of the rank's own may hold its streams longer."""
_BATCH = 1000
"""Lines that one report has at most."""


@dataclass(frozen=True)
class RankStart:
    """A rank to start. words: of its command after `hpctrain run`. job: the file, or its content in `text`. directory: its
    working directory. token: of this start. host: the address of rank 0's node."""

    numbers: RankNumbers
    job: Path
    text: str | None
    words: Sequence[str]
    directory: Path
    token: str
    secret: bytes
    host: str


@dataclass(frozen=True)
class Report:
    """A rank's state. lines: its new output, ("out" or "err", text). status: how its process has ended, None while it runs.
    ending: what it has told of the end of all ranks."""

    lines: Sequence[tuple[str, str]]
    status: int | None
    ending: Ending


class Attendant:
    """Attends one rank."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._channel: ChannelDirectory | None = None
        self._lines: deque[tuple[str, str]] = deque()
        self._readers: list[threading.Thread] = []

    def place(self) -> Place:
        """The place of this actor."""
        return own_place()

    def start(self, start: RankStart) -> int:
        """Start the rank; the id of its process."""
        directory = make_private_directory(start.token, start.numbers.rank, start.secret)
        self._channel = ChannelDirectory(directory)
        job = start.job
        if start.text is not None:
            job = directory / "job.toml"
            job.write_text(start.text)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hpctrain", "run", str(job), *start.words, "--started-by", str(directory)],
            cwd=start.directory,
            env={**started_variables(start.numbers, directory, start.host), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        for name, stream in (("out", self._process.stdout), ("err", self._process.stderr)):
            assert stream is not None
            reader = threading.Thread(target=self._read, args=(name, stream), daemon=True)
            reader.start()
            self._readers.append(reader)
        return self._process.pid

    def _read(self, name: str, stream: IO[str]) -> None:
        with suppress(ValueError):  # closed at the end
            for line in stream:
                self._lines.append((name, line.rstrip("\n")))

    def report(self, signals: Sequence[int]) -> Report:
        """How the rank is. signals: all that it should have got by now, in order; it gets each once."""
        assert self._process is not None and self._channel is not None
        status = self._process.poll()
        if status is None:
            self._channel.pass_on(signals)
        else:
            for reader in self._readers:
                reader.join(_DRAIN)
        lines = [self._lines.popleft() for _ in range(min(_BATCH, len(self._lines)))]
        return Report(lines, None if self._lines else status, ending_in(self._channel.directory))

    def end(self) -> None:
        """End the rank, if it runs, and remove its directory."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._channel is not None:
            self._channel.close()
            shutil.rmtree(self._channel.directory, ignore_errors=True)
