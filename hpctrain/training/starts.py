"""How a run was started: RUN/starts.jsonl has a line for each start, with versions, command, hosts and the git commit, and one for
each time that steps were lost."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from hpctrain.base.devices import device_name, is_accelerator, memory_left
from hpctrain.base.errors import UsageError, reason
from hpctrain.base.launcher_variables import TYPED, launcher_name
from hpctrain.base.safe_files import STARTS, open_to_change, reading
from hpctrain.contracts.identity import Identity
from hpctrain.version import __version__

_PACKAGES = ("numpy", "mpi4py", "h5py", "safetensors", "tokenizers", "transformers")
_GIT_SECONDS = 3.0
# the longest line of starts.jsonl, in bytes
_LONGEST = 2**20


def note_start(
    output_dir: Path,
    identity: Identity,
    hosts: Sequence[str],
    plugins: Sequence[str],
    begin: float,
    device: torch.device,
) -> None:
    """Append a line for this start. hosts: of every rank. plugins: distributions with versions. begin: of the run, in seconds since
    1970. device: of rank 0. Raises UsageError if it can't be written."""
    line = {
        "time": _written(begin),
        "command": _command(),
        "directory": os.getcwd(),
        "ranks": identity.size,
        "hosts": list(dict.fromkeys(hosts)),
        "ranks_of_hosts": list(Counter(hosts).values()),
        "launcher": launcher_name() or identity.source,
        "versions": _versions(),
        "plugins": list(plugins),
        "git": _git(Path.cwd()),
    }
    if is_accelerator(device):  # measurements are shares of its memory
        left = memory_left(device)
        line |= {"device": device_name(device), **({} if left is None else {"device_bytes": left[1]})}
    _append(output_dir, line)


def note_lost(output_dir: Path, step: int, steps: int, seconds: float) -> None:
    """Append a line for steps after `step` whose rows are dropped, since they are trained again."""
    _append(
        output_dir, {"time": _written(time.time()), "back_to_step": step, "lost_steps": steps, "lost_seconds": seconds}
    )


def first_start(output_dir: Path, now: float) -> float:
    """The time of the run's first start, in seconds since 1970; `now` if it is not known."""
    with (
        suppress(OSError, ValueError, TypeError),
        reading(output_dir / STARTS) as fd,
        open(fd, "rb", closefd=False) as file,
    ):
        text = json.loads(file.readline(_LONGEST))["time"]
        return datetime.fromisoformat(text).timestamp()
    return now


def _append(output_dir: Path, content: Mapping[str, Any]) -> None:
    path, line = output_dir / STARTS, json.dumps(content) + "\n"
    try:
        fd = open_to_change(path, os.O_WRONLY | os.O_APPEND)
        with open(fd, "a", encoding="utf-8") as file:
            file.write(line)
    except OSError as error:
        raise UsageError(f"[job] output_dir: {path} cannot be written: {reason(error)}") from None


def _written(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="milliseconds")


def _command() -> str:
    """The command as it was typed: a starter tells its ranks."""
    if TYPED in sys.argv:
        return sys.argv[sys.argv.index(TYPED) + 1]
    program, *words = sys.argv or [""]
    is_ours = Path(program).name == "hpctrain" or Path(program).parts[-2:] == ("hpctrain", "__main__.py")
    return shlex.join(["hpctrain" if is_ours else program, *words])


def _versions() -> dict[str, str]:
    versions = {"hpctrain": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None:
        versions["mpi"] = " ".join(str(mpi.Get_library_version()).splitlines()[0].split())
    return versions


def _git(directory: Path) -> Mapping[str, Any] | None:
    """The commit of the directory, and whether tracked files differ from it (None if that takes too long, since all ranks wait for
    it); None outside of a repository."""
    # No locks, and no file system monitor, which would stay. Git itself refuses a repository of another user, whose settings
    # may name programs, such as filters.
    words = ["git", "-C", str(directory), "-c", "core.fsmonitor=false"]
    environment, until = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, time.monotonic() + _GIT_SECONDS
    commit: dict[str, Any] | None = None

    def answer(*more: str) -> str:
        done = subprocess.run(
            [*words, *more], capture_output=True, text=True, errors="replace", timeout=max(0.0, until - time.monotonic()),
            env=environment, stdin=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        return done.stdout.strip()

    with suppress(OSError, subprocess.SubprocessError):
        commit = {"commit": answer("rev-parse", "HEAD"), "changed": None}
        commit["changed"] = bool(answer("status", "--porcelain", "--untracked-files=no"))
    return commit
