"""submissions.jsonl in a run's directory: a line for each submission of the run. The last complete line counts."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hpctrain.base.errors import UsageError, reason
from hpctrain.base.safe_files import open_to_change, read_bytes
from hpctrain.contracts.scheduler import CANCELLED, RECORD

ID = r"^\w[\w.:/@+=\[\]-]*$"
"""The form of a scheduler's id."""


class Submission(BaseModel):
    """target: the plugin. id: the scheduler's. runs: instead of an id, the directories of an array's runs, below this one."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    target: str
    id: Annotated[str, Field(pattern=ID + "|^$")] = ""
    """Never an option nor a line: a directory may be crafted, and schedulers' commands and scripts get the id."""
    runs: tuple[Annotated[str, Field(pattern=r"^[^/]*[^/.][^/]*$")], ...] = ()

    @model_validator(mode="after")
    def _one_of_both(self) -> Submission:
        if bool(self.id) == bool(self.runs):
            raise ValueError("expected either an id or runs")
        return self


def append(directory: Path, submission: Submission) -> None:
    """Add a line, and wait until it is on disk. Scripts that submit themselves again add lines, too. Raises OSError."""
    row = {"time": round(time.time(), 3), **submission.model_dump(mode="json", exclude_defaults=True)}
    fd = open_to_change(directory / RECORD, os.O_RDWR | os.O_APPEND)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"  # by a full disk, for instance
        os.write(fd, f"{chr(10) * torn}{json.dumps(row)}\n".encode())
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def cancelled(directory: Path) -> Iterator[None]:
    """Mark the run as cancelled now, for its ranks to see; if that fails, leave the mark as an earlier call made it.

    Without a mark (a full disk, another person's directory) it says on stderr what may follow: the job is to end all the same.
    """
    mark = directory / CANCELLED
    try:
        fd, before = _marked(mark)
    except OSError as error:
        print(
            f"hpctrain: warning: {mark} cannot be made ({reason(error)}): the ranks save, but may ask to be started again; "
            "look with `hpctrain status`, and cancel again if they run",
            file=sys.stderr,
        )
        yield
        return
    try:
        yield
    except BaseException:
        with suppress(OSError):
            if before is None:
                mark.unlink()
            else:
                os.utime(fd, ns=before)
        raise
    finally:
        os.close(fd)


def _marked(mark: Path) -> tuple[int, tuple[int, int] | None]:
    """The descriptor of the mark, whose time is now; the times that it had, None if it is new. Raises OSError."""
    try:
        return open_to_change(mark, os.O_WRONLY | os.O_EXCL), None
    except FileExistsError:
        fd = open_to_change(mark, os.O_WRONLY)
    try:
        found = os.fstat(fd)
        os.utime(fd)
    except OSError:
        os.close(fd)
        raise
    return fd, (found.st_atime_ns, found.st_mtime_ns)


def newest(directory: Path) -> Submission | None:
    """The last submission; None if there was none. Raises UsageError for a file that cannot be read."""
    path = directory / RECORD
    try:
        lines = read_bytes(path).splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {reason(error)}") from None
    for line in reversed(lines):
        try:
            return Submission.model_validate_json(line)
        except ValidationError:
            continue
    raise UsageError(f"{path} has no line that `hpctrain submit` wrote; submit the job again")
