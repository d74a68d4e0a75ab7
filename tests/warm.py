"""Starts `python -m hpctrain WORDS` as a fork of a process that has imported torch and hpctrain: in milliseconds, not seconds.
So does horovodrun start its workers.

The child goes on as a fresh interpreter: it runs `hpctrain` as `__main__` with its own arguments, directory, environment, streams
and session, and the interpreter ends as always. Variables that work on an import (IMPORTED_WITH) work no more: `launching` starts
a command cold that sets one. Run as a script, this file is the process that forks.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import io
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

IMPORTED_WITH = (
    "PYTHON",
    "OMP_",
    "MKL_",
    "OPENBLAS_",
    "KMP_",
    "MALLOC_",
    "GLIBC_",
    "LD_",
    "TORCH_",
    "HDF5_",
    "OMPI_",
    "PMI",
    "MPI",
)
_BEFORE = (
    "hpctrain.training.rank", "hpctrain.checkpoint.comparison", "hpctrain.checkpoint.writing", "torch.distributed.checkpoint",
    "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.pipelining", "hpctrain_plugins.checkpoint.dcp",
)  # fmt: skip
MARK = "HPCTRAIN_TEST_MARK"
"""The variable by which launching.py finds the processes of a command."""
_NO_MARK = "-" * 32
_OF_RANKS = ("PMI", "MPI_LOCAL", "MPIR_", "OMPI_")
_ARGUMENTS = " " * 1000
"""Room for the words that `ps` shows of a forked process."""
_LONGEST = 2**17
"""Bytes of a request."""


class Process:
    """A forked command, with what `launching` uses of subprocess.Popen's interface."""

    def __init__(self, pid: int, told: socket.socket, stdout: int, stderr: int) -> None:
        """told: says the exit status, as from `os.waitpid`."""
        self.pid, self.returncode = pid, None
        self.stdout, self.stderr = (os.fdopen(one, errors="replace") for one in (stdout, stderr))
        self._told, self._read = told, {"stdout": "", "stderr": ""}
        self._readers: list[threading.Thread] = []

    def poll(self) -> int | None:
        """The exit code, -N for signal N, or None."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("hpctrain", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both streams to their ends, and wait; TimeoutExpired loses nothing."""
        give_up = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if give_up is None else max(0.0, give_up - time.monotonic())

        if not self._readers:
            self._readers = [threading.Thread(target=self._drain, args=(name,), daemon=True) for name in self._read]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(left())
            if reader.is_alive():
                raise subprocess.TimeoutExpired("hpctrain", timeout or 0.0)
        self.wait(left())
        return self._read["stdout"], self._read["stderr"]

    def _drain(self, name: str) -> None:
        with getattr(self, name) as stream:
            self._read[name] = stream.read()

    def _look(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._told.settimeout(timeout)
            try:
                said = self._told.recv(16)
            except (TimeoutError, BlockingIOError):
                return None
            self._told.close()
            self.returncode = os.waitstatus_to_exitcode(int(said)) if said else -signal.SIGKILL
        return self.returncode


class _Server:
    """The process that forks, as seen from the tests."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), _ARGUMENTS],
                env=_environment({MARK: _NO_MARK}), pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._socket = ours
        atexit.register(self._close)

    def start(self, words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Process:
        with ExitStack() as closing:
            out, errors = os.pipe(), os.pipe()
            told, tells = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            closing.callback(tells.close)
            for _, writing in (out, errors):
                closing.callback(os.close, writing)
            request = json.dumps({"words": list(words), "cwd": str(cwd), "env": dict(env), "umask": _umask()}).encode()
            assert len(request) < _LONGEST
            socket.send_fds(self._socket, [request], [out[1], errors[1], tells.fileno()])
        told.settimeout(60)
        return Process(int(told.recv(16)), told, out[0], errors[0])

    def _close(self) -> None:
        self._socket.close()
        self._process.wait(30)


@functools.cache
def _server() -> _Server:
    return _Server()


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def can_start(words: Sequence[str], env: Mapping[str, str]) -> bool:
    """Whether a fork runs `words` as a new process would. env: the command's own variables."""
    started_here = list(words[:3]) == [sys.executable, "-m", "hpctrain"]
    wanted = _environment(env)
    return started_here and all(
        wanted.get(name) == os.environ.get(name) for name in env if name.startswith(IMPORTED_WITH)
    )


def start(words: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Process:
    """Start `python -m hpctrain ...` in `cwd` with the variables `env` added to this process's."""
    return _server().start(words[3:], cwd, _environment(env))


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **env}


def _serve(requests: socket.socket) -> list[str] | None:
    """Fork for each request. Returns the words in the child, and None when there are no more requests."""
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != requests.fileno():
                    pid, told = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    with suppress(OSError):  # nobody waits for it
                        told.send(str(os.waitpid(pid, 0)[1]).encode())
                    told.close()
                    continue
                message, descriptors, _, _ = socket.recv_fds(requests, _LONGEST, 3)
                if not message:
                    return None
                told = socket.socket(fileno=descriptors[2])
                pid = os.fork()
                if pid == 0:
                    told.close()
                    break
                for one in descriptors[:2]:
                    os.close(one)
                told.send(str(pid).encode())
                watched = os.pidfd_open(pid)
                running[watched] = pid, told
                selector.register(watched, selectors.EVENT_READ)
            else:
                continue
            break
    for watched, (_, told) in running.items():
        os.close(watched)
        told.close()
    requests.close()
    return _become(json.loads(message), descriptors)


def _become(request: dict[str, object], descriptors: Sequence[int]) -> list[str]:
    """Make this process what a new one would be; its words."""
    os.setsid()
    os.chdir(str(request["cwd"]))
    os.umask(request["umask"])  # type: ignore[arg-type]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in background shells
    os.environ.clear()
    os.environ.update(request["env"])  # type: ignore[arg-type]
    _show([sys.executable, "-m", "hpctrain", *request["words"]])  # type: ignore[misc]
    sys.path[0] = os.getcwd()
    importlib.invalidate_caches()
    for wanted, found in zip((1, 2), descriptors[:2], strict=True):
        os.dup2(found, wanted)
        os.close(found)
    # those of the server may be files with a position; PYTHONUNBUFFERED is set
    out, errors = (open(number, "wb", 0, closefd=False) for number in (1, 2))  # noqa: SIM115
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(out, write_through=True)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(errors, "utf-8", "backslashreplace", line_buffering=True)
    random.seed()
    return list(request["words"])  # type: ignore[call-overload]


def _show(words: Sequence[str]) -> None:
    """What the system shows of this process: its words and its mark."""
    begin, end, variables, last = _areas()
    _overwrite(begin, end - begin, words)
    place = ctypes.string_at(variables, last - variables).find(f"{MARK}={_NO_MARK}".encode())
    assert place >= 0
    mark = os.environ[MARK].encode()
    ctypes.memmove(variables + place + len(MARK) + 1, mark, len(mark))


def _areas() -> tuple[int, ...]:
    """arg_start, arg_end, env_start and env_end: fields 48 to 51 of /proc/PID/stat, as in proc(5)."""
    return tuple(map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]))


def _overwrite(place: int, size: int, words: Sequence[str]) -> None:
    text = b"".join(os.fsencode(word) + b"\0" for word in words)[: size - 1]
    ctypes.memmove(place, text.ljust(size, b"\0"), size)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Forks this process where it would start a Horovod script's worker, which would import what it has."""

    imported_with: Mapping[str, str] = {}

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
                       *others: Any) -> None:  # fmt: skip
        become = None if isinstance(args, str) else _program(list(args))
        if become is None or _of_imports(env) != self.imported_with:
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *others)  # type: ignore[misc]
            return
        self.pid = os.fork()
        self._child_created = True
        if self.pid == 0:
            code = 1
            try:
                _be_new(pass_fds, env)
                become(list(args))
                code = 0
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                ctypes.pythonapi.Py_Exit(code)  # ends the interpreter, but none of the frames below


def _program(words: list[str]) -> Callable[[list[str]], None] | None:
    """What runs these words in a fork; None if it takes a new process."""
    return _run_worker if len(words) > 1 and words[1].endswith("/as_worker.py") else None


def _be_new(descriptors: Sequence[int], environment: Mapping[str, str]) -> None:
    """Make this fork of a starter what a process that it has started would be."""
    os.setsid()
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2 and int(name) not in descriptors:
            with suppress(OSError):  # the one of this listing
                os.close(int(name))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one and one not in sys.path]
    subprocess.Popen = subprocess.Popen.__base__  # type: ignore[assignment, misc]


def _run_worker(words: list[str]) -> None:
    """Run the Python script of a worker, as as_worker.py would by exec; by exec what is none."""
    execute = os.execvp

    def run(file: str, command: list[str]) -> None:
        os.execvp = execute
        if command[0] != sys.executable or not command[1].endswith(".py"):
            execute(file, command)
        begin, end, *_ = _areas()
        _overwrite(begin, end - begin, command)
        sys.argv = command[1:]
        sys.path[0] = str(Path(command[1]).parent.absolute())
        # absolute, as Python makes it: processes that multiprocessing starts would look for it where this one began
        runpy.run_path(str(Path(command[1]).absolute()), run_name="__main__")
        raise SystemExit(0)

    os.execvp = run  # type: ignore[assignment]
    sys.argv = words[1:]
    runpy.run_path(words[1], run_name="__main__")


def _of_imports(environment: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if name.startswith(IMPORTED_WITH)}
    return {name: value for name, value in kept.items() if name != "PYTHONPATH" and not name.startswith(_OF_RANKS)}


def main(descriptor: int) -> None:
    """Import, fork, and in a child go on as `python -m hpctrain`."""
    for name in _BEFORE:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    from hpctrain.cli import COMMANDS
    from hpctrain.plugins.entry_points import entry_points
    from hpctrain.plugins.registry import build_registry

    build_registry(())  # imports the plugins
    for name in (
        *(f"hpctrain.cli.{name}" for name in COMMANDS),
        *(one.module for one in entry_points() if one.command),
    ):
        importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would not be there in a child"
    gc.freeze()
    words = _serve(socket.socket(fileno=descriptor))
    if words is not None:
        _Popen.imported_with = _of_imports(os.environ)
        subprocess.Popen = _Popen  # type: ignore[misc]
        sys.argv = ["hpctrain", *words]
        runpy.run_module("hpctrain", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
