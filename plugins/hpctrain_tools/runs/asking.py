"""Asks a running job something by files in its directory, as hpctrain/ranks/watchdog/queries.py says."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hpctrain.base.errors import UsageError, escaped, reason
from hpctrain.base.safe_files import read_bytes, replacing
from hpctrain.ranks.watchdog.queries import WHERE, Question

__all__ = ["Asked", "ask", "asked", "silence"]

_POLL = 0.1  # seconds between two looks


class Asked:
    """The side of the one who asks."""

    def __init__(self, directory: Path, question: Question) -> None:
        self._answer = directory / question.answer
        self._newest: dict[str, Any] | None = None

    def answers(self, seconds: float) -> Iterator[dict[str, Any]]:
        """Each answer that differs from the one before, for so many seconds."""
        give_up = time.monotonic() + seconds
        while True:
            found = _read_answer(self._answer)
            if found is not None and found != self._newest:
                self._newest = found
                yield found
            if time.monotonic() > give_up:
                return
            time.sleep(_POLL)


@contextmanager
def asked(directory: Path, name: str, values: Mapping[str, Any]) -> Iterator[Asked]:
    """A question to the job that runs in `directory`; withdrawn at the end. Raises UsageError if the directory is unfit."""
    question = Question(name, secrets.token_hex(8))
    try:
        with replacing(directory / question.file) as file:
            file.write(json.dumps(values).encode())
    except OSError as error:
        raise UsageError(
            f"{directory}: {reason(error)}; expected the directory of a running job that you may write to"
        ) from None
    try:
        yield Asked(directory, question)
    finally:
        for left in (question.file, question.answer):
            with suppress(OSError):
                (directory / left).unlink(missing_ok=True)


def silence(directory: Path, seconds: float) -> UsageError:
    """The error about a job that does not answer."""
    return UsageError(
        f"no job answered in {directory} within {seconds:g} s; it has ended, has not begun to train, or its rank 0 does not run "
        "(its log is in log/rank-00000.log)"
    )


def ask(directory: Path, patience: float) -> list[str]:
    """The lines of `hpctrain where` on the job that runs in `directory`. Raises UsageError if none comes in `patience` seconds."""
    with asked(directory, WHERE, {}) as job:
        found = next(job.answers(patience), None)
    if found is None:
        raise silence(directory, patience)
    lines = found.get("lines")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise UsageError(f"{directory}: found an answer without lines, expected those of a job")
    return [escaped(line) for line in lines]


def _read_answer(answer: Path) -> dict[str, Any] | None:
    """The answer; None if there is none yet. Raises UsageError for anything else."""
    try:
        found = json.loads(read_bytes(answer))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{answer}: {reason(error)}; expected the answer of a job") from None
    if not isinstance(found, dict):
        raise UsageError(f"{answer} is no answer of a job; expected a JSON object")
    return found
