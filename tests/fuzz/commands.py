"""Runs commands in this process: thousands of mutants would take hours in separate processes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from mutants import lay_out

from hpctrain.cli import execute
from hpctrain.registry import discovery

BYTES = 2 << 30
"""More than any small job needs to be checked or trained."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current directory, with the files that jobs and mutants name."""
    here, path = Path.cwd(), tmp_path_factory.mktemp("jobs")
    lay_out(path)
    os.chdir(path)
    points = tuple(discovery.entry_points())  # reading them takes longer than the rest of a check
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discovery, "entry_points", lambda: points)
        patch.syspath_prepend(str(path))
        yield path
    os.chdir(here)


class TooSlow(BaseException):
    """Not an Exception: only the test may catch it."""


def ending(seconds: int, *words: str) -> tuple[int, str, str | None]:
    """Run `hpctrain WORDS`; return the exit code, the output, and the fault in them (or None)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory from here on
    before, screen, code = _peak(), io.StringIO(), -1
    signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(seconds)
    try:
        with (
            contextlib.redirect_stdout(screen),
            contextlib.redirect_stderr(screen),
            pytest.MonkeyPatch.context() as patch,
        ):
            patch.setattr(sys, "argv", ["hpctrain", *words])
            code = execute()
    except TooSlow as error:
        frames = traceback.extract_tb(error.__traceback__)
        shown = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-12:]))
        return code, screen.getvalue(), f"not done after {seconds} s: {shown}"
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/hpctrain" in frame.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name}" if frames else ""
        return code, screen.getvalue(), f"traceback: {type(error).__name__} in {where}: {str(error)[:150]}"
    finally:
        signal.alarm(0)
    printed, taken = screen.getvalue(), _peak() - before
    if taken > BYTES:
        return code, printed, f"{taken >> 20} MB of memory"
    if "Traceback" in printed:
        last = [line for line in printed.splitlines() if line.strip()][-1]
        frames = re.findall(r"(hpctrain\S+, line \d+)", printed.replace('"', ""))
        return code, printed, f"a traceback is printed: {frames[-1:]}: {last[:200]}"
    return code, printed, None if printed.strip() else f"exit code {code} without a word"


def _alarm(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def _peak() -> int:
    """The peak memory of this process since the peak was cleared, in bytes."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10
