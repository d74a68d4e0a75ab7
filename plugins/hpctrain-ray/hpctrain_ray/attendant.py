"""The Ray actor beside each rank: starts it as a process of its own, passes signals on, collects its output.

The rank ends when this process does, whatever ends it: it reads the end of a pipe of the `ChannelDirectory`. Imports no torch.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hpctrain.base.launcher_variables import RankNumbers, started_variables
from hpctrain.starting.channel_directory import ChannelDirectory, Ending, ending_in
from hpctrain.starting.mpi_library import ask_library
from hpctrain.starting.pmi import PmiRelay
from hpctrain.toolkit.commands import EnvironmentUnfitError, python_module
from hpctrain_ray.private_directories import make_private_directory
from hpctrain_ray.seats import Node, own_node

_DRAIN = 1.0
"""Seconds for the rest of an ended rank's output: a process of the rank's own may hold its streams longer."""
_MPI_START = 900.0
"""Seconds for an answer of PMI, which may wait for all ranks: the limit of MPI's start."""
_BATCH = 1000
"""Lines that one report has at most."""


@dataclass(frozen=True)
class RankStart:
    """A rank to start. words: of its command after `hpctrain run`. job: the file, or its content in `text`. directory: its
    working directory. token: of this start. host: the address of rank 0's node. pmi: the `PmiActor`, for ranks over MPI."""

    numbers: RankNumbers
    job: Path
    text: str | None
    words: Sequence[str]
    directory: Path
    token: str
    secret: bytes
    host: str
    pmi: Any = None


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

    def node(self) -> Node:
        """The node of this actor."""
        return own_node()

    def start(self, start: RankStart) -> int:
        """Start the rank; the id of its process."""
        directory = make_private_directory(start.token, start.numbers.rank, start.secret)
        self._channel = ChannelDirectory(directory)
        job = start.job
        if start.text is not None:
            job = directory / "job.toml"
            job.write_text(start.text)
        relay = None if start.pmi is None else _relay(start)
        variables = started_variables(start.numbers, directory, start.host) if relay is None else relay.environment()
        self._process = subprocess.Popen(
            python_module("hpctrain", "run", str(job), *start.words, "--started-by", str(directory)),
            cwd=start.directory,
            env={**variables, "PYTHONUNBUFFERED": "1"},
            pass_fds=() if relay is None else relay.descriptors(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if relay is not None:
            relay.started()
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


def _relay(start: RankStart) -> PmiRelay:
    """The descriptor over which the rank's MPI library asks the `PmiActor`. Raises EnvironmentUnfitError without such a library."""
    import ray

    library = ask_library()
    if library is None or not library.speaks_pmi:
        found = "no MPI" if library is None else f"{library.flavour}, which does not speak PMI-1"
        raise EnvironmentUnfitError(
            f'[communicator] name = "mpi": found {found} on {own_node().address}, expected MPICH or a relative of it on every '
            "node of the cluster (pip install 'hpctrain[mpich]'), or another communicator"
        )

    def ask(line: str) -> str:
        answer: str = ray.get(start.pmi.ask.remote(start.numbers.rank, line), timeout=_MPI_START)
        return answer

    return PmiRelay(start.numbers, ask)
