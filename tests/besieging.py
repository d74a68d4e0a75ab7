"""Lets another user of the machine work on a job while it runs (tests/faults/programs/stranger.py)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jobs import JobFile

STRANGER = Path(__file__).parent / "faults" / "programs" / "stranger.py"
PYTHON = shutil.which("python3", path="/usr/bin") or "python3"
"""The system's Python, which every user can run."""
KINDS = 59
"""The least number of attempts."""

ATTACKED = """
import pathlib
import time

from hpctrain.api import hookimpl

LOG, end = pathlib.Path("out/log/rank-00000.log"), time.monotonic() + 60


@hookimpl
def hpctrain_step_end(step):
    while step > 100 and "a connection from" not in LOG.read_text() and time.monotonic() < end:
        time.sleep(0.1)
"""
"""A plugin that lets a job go on when its store has been attacked. The stranger is slow where the machine is busy."""


@contextmanager
def open_job() -> Iterator[JobFile]:
    """A job of a few seconds in a directory that everybody may enter."""
    directory = Path(tempfile.mkdtemp(prefix="strangers-"))
    directory.chmod(0o755)
    job = JobFile(directory)
    yield job.set(job={"steps": 150}, evaluation={"every_steps": 50}, checkpoint={"every_steps": 50})
    shutil.rmtree(directory)


@contextmanager
def besieged(
    job: JobFile, ranges: Sequence[str] = (), enter: Sequence[str] = (), everywhere: bool = False
) -> Iterator[dict[str, Any]]:
    """Runs a stranger, whom the job awaits. Afterwards the dictionary has the attempts, and a table of them is printed. Fails
    if any attempt got something.

    ranges: "HOST:FIRST-LAST" of ports to try, instead of those found in /proc. enter: a command that runs the stranger
    elsewhere. everywhere: also knock at ports that listen on all addresses.
    """
    found: dict[str, Any] = {}
    (job.directory / "attacked.py").write_text(ATTACKED)
    job.set(plugins={"load": ["attacked"]})
    siege = subprocess.Popen(
        [*enter, PYTHON, str(STRANGER), str(os.geteuid()), str(job.directory), *ranges],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, cwd="/",
        env={**os.environ, **({"STRANGER_KNOCKS_EVERYWHERE": "1"} if everywhere else {})},
    )  # fmt: skip
    try:
        assert siege.stdout is not None and siege.stdout.readline() == "ready\n"
        yield found
        (job.directory / "stop").touch()
        found.update(json.loads(siege.communicate(timeout=60)[0]))
    finally:
        siege.kill()
        siege.wait()
    for kind, times in sorted(found["made"].items()):
        print(f"{kind:42} {times:7} times, got {found['got'].get(kind, 'nothing')}")
    print(f"{len(found['made'])} kinds at {len(found['addresses'])} addresses: {found['addresses']}")
    assert found["got"] == {}, found["got"]
    assert len(found["made"]) >= KINDS and min(found["made"].values()) > 0, found


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
