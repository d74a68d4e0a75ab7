"""Runs commands as a user types them, with a time limit, and checks that nothing is left running afterwards."""

from __future__ import annotations

import importlib
import io
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from pytest import MonkeyPatch

from hpctrain.cli import execute

MARK = "HPCTRAIN_TEST_MARK"
"""The variable by which the processes of a command are found."""
_LEAVING = 10.0
"""Seconds within which ranks must end after their launcher."""


@dataclass(frozen=True)
class Finished:
    """How a command ended."""

    code: int
    out: str
    err: str

    def __str__(self) -> str:
        return f"exit {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Started:
    """A command that runs; `finish` waits for it."""

    def __init__(self, words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            words,
            cwd=cwd,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **env, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, timeout: float) -> Finished:
        """Wait for it; return its exit code and output. Fails if it takes too long or leaves a process behind."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill_all()
            out, err = self.process.communicate()
            raise AssertionError(f"not done after {timeout} s\n{out}\n{err}") from None
        left = self._wait_for_none(_LEAVING)
        self.kill_all()
        assert not left, f"left running: {left}\n{out}\n{err}"
        return Finished(self.process.returncode, out, err)

    def members(self) -> list[psutil.Process]:
        """Every live process of this command."""
        found = []
        for process in psutil.process_iter():
            try:
                mine = process.pid == self.process.pid or process.environ().get(MARK) == self.mark
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, without launchers and those that stand for a rank under mpiexec."""
        words = {process: _command_line(process) for process in self.members()}
        by_pid = {process.pid: line for process, line in words.items()}
        return [
            process
            for process, line in words.items()
            # a forked rank has its starter's command line
            if "hpctrain" in line[:5] and ("--started-by" in line or by_pid.get(_parent(process)) == line)
        ]

    def kill_all(self) -> None:
        for process in self.members():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue

    def _wait_for_none(self, seconds: float) -> list[str]:
        give_up = time.monotonic() + seconds
        while (members := self.members()) and time.monotonic() < give_up:
            time.sleep(0.1)
        return [" ".join(_command_line(p)) for p in members]


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return 0


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


@contextmanager
def started(words: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> Iterator[Started]:
    """A running command. All its processes are killed at the end of the `with`."""
    command = Started(words, cwd, env or {})
    try:
        yield command
    finally:
        command.kill_all()
        command.process.wait(timeout=30)


def run(words: Sequence[str], cwd: Path, timeout: float = 120, env: Mapping[str, str] | None = None) -> Finished:
    """Run a command to its end."""
    with started(words, cwd, env) as command:
        return command.finish(timeout)


def in_process(*words: object, cwd: Path, env: Mapping[str, str] | None = None) -> Finished:
    """Run `hpctrain WORDS` in this process, for a command that starts no ranks: a new process imports torch for two seconds.

    What it leaves behind is put back: its directory, variables, streams, `sys.path` and the modules that it imported from `cwd`.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True) for _ in range(2))
    variables, modules = dict(os.environ), set(sys.modules)
    with MonkeyPatch.context() as patch, open(os.devnull) as nothing:
        patch.chdir(cwd)
        os.environ.update(env or {})
        for name, value in {"stdin": nothing, "stdout": out, "stderr": err, "dont_write_bytecode": True}.items():
            patch.setattr(sys, name, value)
        patch.setattr(sys, "argv", ["hpctrain", *map(str, words)])
        patch.setattr(sys, "path", [*sys.path])
        importlib.invalidate_caches()
        try:
            code = execute()
        finally:
            os.environ.clear()
            os.environ.update(variables)
            forget_modules(modules, cwd)
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return Finished(code, *texts)


def forget_modules(before: Collection[str], directory: Path) -> None:
    """Forget the modules below `directory` that were imported since: the next one may have another of the same name."""
    for name in sys.modules.keys() - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(f"{directory}{os.sep}"):
            del sys.modules[name]


def hpctrain(*words: str, python: str = sys.executable) -> list[str]:
    """The command line of `hpctrain WORDS`."""
    return [python, "-m", "hpctrain", *words]


def wait_until(condition: object, seconds: float, what: str) -> None:
    """Poll `condition()` until it is true."""
    give_up = time.monotonic() + seconds
    assert callable(condition)
    while not condition():
        assert time.monotonic() < give_up, f"not within {seconds} s: {what}"
        time.sleep(0.02)


INTERRUPT, TERMINATE, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGKILL
SOON = signal.SIGUSR1
"""The signal that Slurm sends before the time limit."""
