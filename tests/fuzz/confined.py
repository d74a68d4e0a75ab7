"""Runs commands in a process with limited memory and time, to bound the cost of a crafted file.

One process has imported everything and forks for each request, so that a command costs milliseconds. Run as a script, this file
is that process; `Confined` starts it and sends requests.
"""

from __future__ import annotations

import functools
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECONDS = 10.0
"""Of computing: a busy machine takes longer."""
_LONGEST = 60.0
"""Seconds after which a command counts as one that does not end."""
NBYTES = 2 * 2**30


@dataclass(frozen=True)
class Ended:
    """The end of a command. `code` is None if it did not end by itself; then `err` has the reason."""

    words: list[str]
    code: int | None
    out: str
    err: str
    seconds: float

    def faults(self) -> list[str]:
        """Faults that no file may cause: no end, a traceback, no sentence, terminal control characters."""
        found = []
        if self.code is None:
            found.append(self.err)
        elif self.code not in (0, 1, 2, 4, 5):
            found.append(f"exit {self.code}")
        if "Traceback (most recent call last)" in self.err + self.out:
            found.append("a traceback: " + (self.err.strip() or self.out.strip()).splitlines()[-1][:200])
        elif self.code not in (0, 1) and "hpctrain: " not in self.err and "Usage: " not in self.err:
            found.append("no sentence")
        if any(not one.isprintable() for line in (self.out + self.err).splitlines() for one in line.replace("\t", "")):
            found.append("characters that steer a terminal")
        if self.seconds > SECONDS:
            found.append(f"{self.seconds:.0f} s")
        return found


class Confined:
    """Runs several `hpctrain WORDS` one after the other in one process, each with a limit."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, cwd: Path, *commands: list[str]) -> list[Ended]:
        """Run `commands`; return the end of each."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"cwd": str(cwd), "commands": commands}) + "\n")
        self._process.stdin.flush()
        return [Ended(**one) for one in json.loads(self._process.stdout.readline())]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@contextmanager
def confined() -> Iterator[Confined]:
    """Share a `Confined` among many tests."""
    one = Confined()
    try:
        yield one
    finally:
        one.close()


def _serve() -> None:
    import torch.distributed.checkpoint
    from hpctrain_plugins.checkpoint.dcp import read, write  # noqa: F401
    from hpctrain_tools.checkpoint import conversion  # noqa: F401

    from hpctrain.checkpoint import finding  # noqa: F401
    from hpctrain.cli import cli
    from hpctrain.registry import registry
    from hpctrain.training import rank  # noqa: F401

    torch.set_num_threads(1)
    registry.build_registry = functools.cache(registry.build_registry)  # takes most of the time of a small command
    registry.build_registry(())
    for name in cli.list_commands(None):  # type: ignore[arg-type]
        cli.get_command(None, name)  # type: ignore[arg-type]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        commands, done = request["commands"], []
        while len(done) < len(commands):  # one of several commands killed the process
            done += _ask_a_child(request["cwd"], commands[len(done) :])
        answers.write(json.dumps(done) + "\n")
        answers.flush()


def _ask_a_child(cwd: str, commands: list[list[str]]) -> list[dict[str, Any]]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        os.setsid()
        os.chdir(cwd)
        _limit_memory()
        for words in commands:
            os.write(writing, json.dumps(_command(words)).encode() + b"\n")
        os._exit(0)
    os.close(writing)
    done, raw, begin = [], b"", time.monotonic()
    while len(done) < len(commands):
        left = begin + _LONGEST - time.monotonic()
        ready = select.select([reading], [], [], max(0, left))[0]
        chunk = os.read(reading, 2**20) if ready else b""
        if not chunk:
            how = "killed by the system" if ready else f"not through after {_LONGEST:g} s"
            done.append({"words": commands[len(done)], "code": None, "out": "", "err": how, "seconds": SECONDS})
            break
        raw += chunk
        *lines, raw = raw.split(b"\n")
        if lines:
            begin = time.monotonic()
        done += map(json.loads, lines)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    if done[-1]["code"] is None and os.WIFSIGNALED(status) and done[-1]["err"].startswith("killed"):
        done[-1]["err"] = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    os.close(reading)
    return done


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + NBYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _command(words: list[str]) -> dict[str, Any]:
    from hpctrain.cli import execute

    begin, streams = time.process_time(), [tempfile.TemporaryFile("w+", errors="backslashreplace") for _ in range(2)]  # noqa: SIM115
    sys.argv = ["hpctrain", *words]
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = streams
    try:
        code = _restore(Path(words[1])) if words[0] == "restore" else execute()
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout, sys.stderr = before
    texts = []
    for stream in streams:
        stream.seek(0)
        texts.append(stream.read(100_000))
        stream.close()
    return {"words": words, "code": code, "out": texts[0], "err": texts[1], "seconds": time.process_time() - begin}


def _restore(path: Path) -> int:
    """Restore as a resume does, into tensors like those of the checkpoint `whole`."""
    import torch
    from hpctrain_tools.checkpoint.writing import alone

    from hpctrain.api import Piece
    from hpctrain.base.errors import HpctrainError
    from hpctrain.checkpoint.finding import format_of
    from hpctrain.checkpoint.store import CheckpointStore
    from hpctrain.registry.registry import build_registry

    formats = build_registry(()).instances("checkpoint")
    format = format_of(Path("whole"), formats)
    tensors = format.tensors(Path("whole")).items()
    pieces = [Piece.whole(name, torch.zeros(one.shape, dtype=one.dtype)) for name, one in tensors]
    try:
        with alone() as group:
            CheckpointStore(path.parent, format, formats, group).restore(pieces, path)
    except HpctrainError as error:
        print(f"hpctrain: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    _serve()
