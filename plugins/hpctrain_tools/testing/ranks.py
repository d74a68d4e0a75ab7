"""Starts the ranks of the kit's runs: a process that has imported torch and hpctrain forks them, in milliseconds.

The kit's process asks it over its standard streams, a line of JSON each way. Run as a module, this file is that process.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from hpctrain.base.child_python import python_module
from hpctrain.base.safe_files import scratch_directory
from hpctrain_tools.launch.channel_directory import ChannelDirectory
from hpctrain_tools.launch.forking import prepare
from hpctrain_tools.launch.processes import StartRank, launch

LATE = 124
"""The exit code of a run that was ended since it took too long."""


@dataclass(frozen=True)
class Request:
    """A run of the job.toml in `directory`, with its screen in a file there. here: the current directory. path: of modules.
    seconds: its limit. program: the words of one whose job the file is laid on."""

    directory: str
    here: str
    ranks: int
    path: tuple[str, ...] = ()
    seconds: float = 120.0
    program: tuple[str, ...] = ()


class Starter:
    """The process that forks, as the kit sees it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            python_module("hpctrain_tools.testing.ranks"),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.close)

    def run(self, request: Request) -> tuple[int, str]:
        """The exit code of a run, and its screen."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the process that starts the kit's ranks has ended with status {self._process.wait()}")
        return int(answer), (Path(request.directory) / "screen").read_text(errors="replace")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@cache
def starter() -> Starter:
    """The starter of this process."""
    return Starter()


def main() -> None:
    """Answer requests until there are no more."""
    start = prepare("run", {})
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        values = json.loads(line)
        sys.path[:] = values["path"]
        answers.write(f"{_run(Request(**values), start)}\n")
        answers.flush()


def _run(request: Request, start: StartRank) -> int:
    job = Path(request.directory) / "job.toml"
    with (
        _inside(Path(request.here), job.with_name("screen")),
        scratch_directory() as directory,
        closing(ChannelDirectory(directory)) as link,
    ):
        command = python_module("hpctrain", "run", str(job), "--started-by", str(directory))
        if request.program:
            command = python_module("hpctrain", "prove", "--on-top", str(job), "--", *request.program)
        launched = launch(command, request.ranks, directory, start)
        give_up = time.monotonic() + request.seconds
        try:
            status = launched.wait(request.seconds)
        except subprocess.TimeoutExpired:
            status = LATE
        finally:
            while launched.poll() is None and time.monotonic() < give_up + 5:
                link.kill_ranks()
                launched.kill()
                time.sleep(0.05)
        code = link.exit_code
    return status if code is None or status == LATE else code


@contextmanager
def _inside(directory: Path, file: Path) -> Iterator[None]:
    """`directory` as the current one, and a file in place of this process's streams, which the ranks inherit."""
    before, kept = Path.cwd(), [os.dup(number) for number in (1, 2)]
    os.chdir(directory)
    screen = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        for number in (1, 2):
            os.dup2(screen, number)
        yield
    finally:
        sys.stdout.flush()
        os.close(screen)
        for number, one in zip((1, 2), kept, strict=True):
            os.dup2(one, number)
            os.close(one)
        os.chdir(before)


if __name__ == "__main__":
    main()
