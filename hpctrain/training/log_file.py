"""Every rank's own log, RUN/log/rank-00000.log: hpctrain's lines, and what users' code prints."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TextIO

from hpctrain.base.errors import UsageError, escaped, reason
from hpctrain.base.safe_files import log_of, make_directory, open_to_change
from hpctrain.contracts.identity import Identity
from hpctrain.ranks.prints import Labelled, tell

LOG = logging.getLogger("hpctrain")

BEGUN = "rank 0 of "
"""Begins the first line of a start in rank 0's log. `hpctrain runs` reads these words, too."""
DONE = "done         step "
"""Begins the line of a run that has ended; no other comes after it but where the results are."""
STOPPED = "stopped at step "
"""Begins the line of a run that was stopped and has saved."""
AS_CANCELLED = ", as it was cancelled"
"""Part of the line of a stopped run that `hpctrain cancel` ended."""


KILLED = "Killed"
"""Begins the line that a starter writes of a rank that could not."""
_FORMAT = "%(asctime)s %(levelname)s %(message)s"


class _LogFile(logging.StreamHandler[TextIO]):
    """Drops lines that cannot be written; logging would print a traceback on the screen for each."""

    def __init__(self, path: Path) -> None:
        make_directory(path.parent)
        fd = open_to_change(path, os.O_WRONLY | os.O_APPEND)
        super().__init__(open(fd, "a", encoding="utf-8"))  # noqa: SIM115 - open while the handler is

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        return

    def close(self) -> None:
        with suppress(OSError):
            self.stream.close()
        super().close()


class _Screen(logging.Handler):
    """Standard error as it is when a line comes."""

    def emit(self, record: logging.LogRecord) -> None:
        tell(self.format(record))


class _Escaped(logging.Formatter):
    """Escapes control characters: a line may quote another person's file. Times have their zone."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        moment = datetime.fromtimestamp(record.created, timezone.utc).astimezone()
        return f"{moment:%Y-%m-%d %H:%M:%S},{moment.microsecond // 1000:03d}{moment:%z}"


def note_killed(output_dir: Path, rank: int, why: str) -> None:
    """Write why a rank has ended into its log, for those who read it later; the screen has it already."""
    with suppress(OSError):
        if log_of(output_dir, rank).is_file():
            file = _LogFile(log_of(output_dir, rank))
            file.setFormatter(_Escaped(_FORMAT))
            file.handle(logging.makeLogRecord({"levelname": "INFO", "msg": f"{KILLED}: {why}"}))
            file.close()


@contextmanager
def logged_to_file(output_dir: Path, identity: Identity) -> Iterator[None]:
    """Write every rank's log to its own file, and rank 0's warnings to the screen, too."""
    path = log_of(output_dir, identity.rank)
    try:
        file = _LogFile(path)
    except OSError as error:
        raise UsageError(f"[job] output_dir: {path} cannot be written: {reason(error)}") from None
    file.setFormatter(_Escaped(_FORMAT))
    handlers: list[logging.Handler] = [file]
    if identity.rank == 0:
        screen = _Screen()
        screen.setLevel(logging.WARNING)
        screen.setFormatter(_Escaped("hpctrain: warning: %(message)s"))
        handlers.append(screen)
    LOG.setLevel(logging.INFO)
    for handler in handlers:
        LOG.addHandler(handler)
    Labelled.copy = lambda line: file.handle(logging.makeLogRecord({"levelname": "PRINT", "msg": line}))
    LOG.info("rank %d of %d on %s (%s)", identity.rank, identity.size, identity.node, identity.source)
    try:
        yield
    finally:  # a program may run another job after this one
        Labelled.copy = None
        for handler in handlers:
            LOG.removeHandler(handler)
            handler.close()
